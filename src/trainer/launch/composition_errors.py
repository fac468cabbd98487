"""Hydra's errors in one line: what was given, what is wrong with it, what was probably meant."""

import re

from trainer.config_diff import printable
from trainer.files import script
from trainer.launch.saved_config import AS_SAVED


def explain(error: BaseException, arguments: list[str]) -> str:
    """Return Hydra's composition error in one line: the given word, the problem, the probable intention."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigIndexError

    from trainer.config import suggestion_for
    from trainer.config.schema import ELSEWHERE, nearest

    text = str(error)
    if isinstance(error, OverrideParseException):
        if "=~" in str(error.override):
            return f"{error.override}: ~ is not expanded after =; write $HOME"
        fix = "quote values with spaces, any of ,=[]{}()<> or letters beyond a to z as \"KEY='VALUE'\""
        key, equals, value = str(error.override).partition("=")
        if not equals:
            fix = f"write {suggestion_for(key) or 'KEY'}=VALUE"
        elif value[:1] in ("{", "["):  # quotes around a section or list are the shell's, or it is text
            fix = f'quote the whole argument, as "{key}=[...]" or "{key}={{a: 1, b: 2}}"'
        return f"{key}{equals}{printable(key.lstrip('+~'), value)}: cannot be read as KEY=VALUE; {fix}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = [option for option in error.options if option != AS_SAVED]
        meant = nearest(choice, options, ELSEWHERE)
        hint = f"did you mean {meant}?" if meant else "choose one"
        return f"{group}={choice}: there is no such {group}; {hint} ({', '.join(options)})"
    if found := re.match(r"Could not override '([^']+)'", text):
        key = found[1]
        if appended := re.search(r"To append to your default list use (\+\S+)", text):
            return f"{appended[1][1:]}: {key} has no default to replace; write {appended[1]}"
        return _not_in_config(key, _given(key, arguments))
    if found := re.match(r"Could not delete from config. '([^']+)'", text):
        return f"~{found[1]}: there is no such key to delete"
    if found := re.match(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{found[1]}={_given(found[1], arguments)}: the key exists already; write it without +"
    if found := re.match(r"force-add of config groups is not supported: '\+\+(\S+)'", text):
        return f"++{found[1]}: ++ is for keys; choose with +{found[1]}, or {found[1]} where there is a default"
    if found := re.match(r"Error merging override (.+)", text):
        if isinstance(error.__cause__, ConfigIndexError):
            key = str(error.__cause__.full_key)
            return f'{key}: there is no such entry; write the whole list, as "{key.rpartition("[")[0]}=[...]"'
        from trainer.config import Config
        from trainer.config.schema import describe, generic, keys_of

        wanted = keys_of(Config).get(generic(found[1].lstrip("+").partition("=")[0]))
        return f"{found[1]}: must be {describe(wanted) if wanted else 'of another kind (value, list or section)'}"
    if found := re.match(r"Multiple values for (\S+)\.|(\S+) appears more than once in the final defaults", text):
        group = found[1] or found[2]
        once = (
            "+recipe=NAME once, or a whole run with a precision: +recipe=[RUN,PRECISION]"
            if group == "recipe"
            else f"{group}=NAME, once"
        )
        return f"{group}={_given(group, arguments)}: {group} is chosen twice; write {once}"
    if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'", text):
        return f"{found[1]}: several values; add -m to run them one after the other, or write a list as KEY=[a,b]"
    return text.split("\nConfig search path")[0].split("\nSet the environment")[0]


def _given(key: str, arguments: list[str]) -> str:
    """Return the value that the command line gives a key, for display, secrets hidden."""
    for argument in reversed(arguments):
        name, _, value = argument.partition("=")
        if re.sub(r"\[(\d+)\]", r".\1", name.lstrip("+~").partition("@")[0]) == key:
            return printable(key, value)
    return ""


def _not_in_config(key: str, value: str) -> str:
    """Explain a key that Hydra refuses because the chosen YAML lacks it; the schema may know it."""
    from trainer.config import Config, unknown_key
    from trainer.config.schema import keys_of

    if key.startswith("hydra."):
        return f"{key}={value}: Hydra has no such setting; python {script('train.py')} --hydra-help lists them"
    if key in keys_of(Config):
        return f"{key}={value}: the chosen configs do not use this key; to set it anyway, write ++{key}={value}"
    return unknown_key(key, value)
