"""Setting names of torchtitan, Megatron-LM and transformers, and the corresponding keys.

Used in messages about unknown keys. Names are looked up with and without their section, dashes as underscores.
"""

KEYS = {
    "trainer.max_steps": "training.steps train_iters max_iters train_steps train_samples",
    "trainer.sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length block_size",
    "trainer.microbatch_size": "local_batch_size micro_batch_size per_device_train_batch_size device_batch_size mbs",
    "trainer.global_batch_size": "batch_size train_batch_size gradient_accumulation_steps gbs",
    "run.dir": "dump_folder output_dir out_dir save save_dir",
    "run.resume": "load resume_from_checkpoint load_step enable_checkpoint",
    "run.init_from": "initial_load_path init_checkpoint pretrained",
    "checkpoint.every": "save_interval save_steps interval checkpoint_interval",
    "checkpoint.keep": "keep_latest_k save_total_limit",
    "logging.every": "log_freq log_interval logging_steps",
    "eval.every": "eval_interval eval_steps",
    "eval.batches": "eval_iters",
    "profile.steps": "enable_profiling profile_freq profile_step_start",
    "data.path": "data_path dataset dataset_path train_data_path",
    "data.validation_path": "valid_data_path validation_file",
    "data.tokenizer": "tokenizer_model tokenizer_path vocab_file tokenizer_type hf_assets_path",
    "parallel.shard": "data_parallel_shard_degree dp_shard fsdp_size use_fsdp fsdp",
    "parallel.replicate": "data_parallel_replicate_degree dp_replicate",
    "parallel.expert": "expert_parallel_degree expert_model_parallel_size ep_size ep",
    "parallel.tensor": "tensor_parallel_degree tensor_model_parallel_size tensor_parallel tp_size tp",
    "parallel.context": "context_parallel_degree context_parallel_size context_parallel cp_size cp",
    "parallel.pipeline": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel pp_size pp",
    "optim.lr": "learning_rate",
    "optim.warmup_steps": "lr_warmup_iters lr_warmup_steps warmup_iters",
    "optim.clip": "clip_grad max_norm max_grad_norm grad_clip gradient_clipping",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_eps adam_epsilon",
    "model.num_heads": "num_attention_heads n_heads n_head",
    "model.num_layers": "num_hidden_layers n_layers n_layer",
    "model.hidden_size": "dim d_model n_embd",
    "model.intermediate_size": "ffn_hidden_size",
    "model.moe_intermediate_size": "moe_ffn_hidden_size",
    "model.num_experts": "n_routed_experts num_local_experts",
    "model.num_experts_per_token": "moe_router_topk top_k num_experts_per_tok",
    "model.num_mtp_layers": "mtp_num_layers num_nextn_predict_layers",
    "recompute": "recompute_granularity activation_checkpoint gradient_checkpointing activation_checkpointing",
}
"""Key -> its names in other frameworks."""
OURS = {name: key for key, names in KEYS.items() for name in names.split()}


def octet_key(name: str) -> str | None:
    """Return the key for a name of another framework, or None."""
    name = name.replace("-", "_")
    return OURS.get(name) or OURS.get(name.rpartition(".")[2])
