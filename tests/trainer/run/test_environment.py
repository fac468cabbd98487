"""What a run folder says of the machine and the code."""

import json
import re

import torch

from trainer.run.environment import environment


def test_environment_records_what_a_run_ran_with() -> None:
    found = environment()
    assert found["torch"] == torch.__version__ and found["packages"]["torch"] in torch.__version__
    assert json.loads(json.dumps(found)) == found
    assert found["git"] is None or re.fullmatch(r"[0-9a-f]{40}", found["git"]["commit"])
