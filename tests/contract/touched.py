"""Attributes of other packages that our GPU paths use though no import of ours names them: those of returned objects.

`test_contract.py` looks each up in the sources of the CUDA wheels that launch/locks pins. Who touches another attribute
of a foreign object adds it here, and a test says so where the object has one of the names in ROOTS; imports, calls of
what is imported, engine arguments and environment variables are read off the code itself.
"""

VLLM = {
    "vllm.LLM": "llm_engine reset_prefix_cache sleep wake_up",
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "add_request step abort_request reset_encoder_cache model_executor engine_core"
    ),
    "vllm.v1.engine.core_client.InprocClient": "shutdown execute_dummy_batch",
    "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher": "driver_worker _distributed_args",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner sleep wake_up",
    # The first where Triton is there, the second with VLLM_USE_V2_MODEL_RUNNER=0.
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "model kv_caches model_config vllm_config lora_manager",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "model kv_caches model_config vllm_config lora_manager",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager.LoRAModelManager": (
        "model modules packed_modules lora_index_to_id remove_adapter add_adapter activate_adapter"
    ),
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": "base_layer lora_a_stacked lora_b_stacked",
    "vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA": "sharded_to_full_mapping sharded_to_full_mapping_gpu",
    "vllm.lora.layers.fused_moe.FusedMoEWithLoRA": "adapter_enabled",
    "vllm.model_executor.models.utils.WeightsMapper": "get_rename_mapper",
    "vllm.model_executor.models.registry._ModelRegistry": "models register_model",
    "vllm.model_executor.models.registry._LazyRegisteredModel": "load_model_cls",
    "vllm.multimodal.registry.MultiModalRegistry": "register_processor",
    # `engines/vllm/vision.py` overrides these.
    "vllm.multimodal.processing.context.BaseProcessingInfo": "get_supported_mm_limits get_mm_max_tokens_per_item",
    "vllm.model_executor.models.qwen2_vl.Qwen2VLForConditionalGeneration": "compute_logits",
    "vllm.model_executor.models.qwen2_5_vl.Qwen2_5_VLForConditionalGeneration": "compute_logits",
    "vllm.model_executor.models.qwen3_vl.Qwen3VLForConditionalGeneration": "compute_logits deepstack_input_embeds",
    "vllm.model_executor.models.idefics3.Idefics3ForConditionalGeneration": "compute_logits",
    "vllm.multimodal.inputs.PlaceholderRange": "get_num_embeds",
    "vllm.inputs.engine.MultiModalInput": "type prompt_token_ids mm_kwargs mm_hashes mm_placeholders",
    "vllm.engine.arg_utils.EngineArgs": "mm_processor_cache_gb skip_mm_profiling",
    "vllm.outputs.RequestOutput": "request_id outputs finished",
    "vllm.outputs.CompletionOutput": "token_ids logprobs finish_reason routed_experts",
    "vllm.logprobs.Logprob": "logprob",
    "vllm.distributed.parallel_state.GroupCoordinator": "rank ranks group_ranks cpu_group",
    "vllm.model_executor.model_loader.dummy_loader.DummyModelLoader": "load_weights",
}
"""Class -> attributes that we read, set or call."""

SGLANG = {
    "sglang.srt.entrypoints.engine.Engine": (
        "tokenizer_manager loop async_generate get_all_child_pids shutdown run_scheduler_process_func "
        "_launch_detokenizer_subprocesses _launch_scheduler_processes"
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager": (
        "_dispatch_to_scheduler get_weights_by_name begin_weight_update end_weight_update update_weights_from_tensor "
        "init_weights_update_group update_weights_from_distributed flush_cache release_memory_occupation "
        "resume_memory_occupation"
    ),
    "sglang.srt.managers.io_struct.FlushCacheReqOutput": "success message",
    "sglang.srt.managers.io_struct.GetWeightsByNameReqInput": "name",
    "sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqInput": "serialized_named_tensors",
    "sglang.srt.managers.io_struct.ReleaseMemoryOccupationReqInput": "tags",
    "sglang.srt.managers.io_struct.ResumeMemoryOccupationReqInput": "tags",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": (
        "tp_cpu_group tp_worker get_weights_by_name update_weights_from_tensor release_memory_occupation "
        "resume_memory_occupation"
    ),
    "sglang.srt.managers.tp_worker.BaseTpWorker": "deserialize_own_rank",
    "sglang.srt.managers.tp_worker.TpModelWorker": "model_runner",
    "sglang.srt.model_executor.model_runner.ModelRunner": "model token_to_kv_pool",
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater": (
        "receive_weights_from_distributed"
    ),
    # ServerArgs.device and `get_parallel().tp_rank` are put together at run time: tests/engines meets them on a CPU.
    "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper": "maybe_sleep poller",
    "sglang.srt.configs.model_config.ModelConfig": "_get_hf_eos_token_id",
    "sglang.srt.layers.sampler.Sampler": (
        "forward _preprocess_logits output_logprob_processor _sync_token_ids_across_tp"
    ),
    "sglang.srt.layers.logprob_processor.OutputLogprobProcessor": "compute_logprobs",
    "sglang.srt.layers.logprob_processor.LogprobResult": "write_output_to",
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput": "next_token_logits",
    "sglang.srt.managers.schedule_batch.ScheduleBatch": "reqs device",
    "sglang.srt.managers.schedule_batch.Req": "sampling_params",
    "sglang.srt.sampling.sampling_params.SamplingParams": "sampling_seed",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures top_ks top_ps need_top_p_sampling sampling_seed from_schedule_batch"
    ),
}

MEGATRON = {
    "megatron.core.distributed.DistributedDataParallel": (
        "module buffers expert_parallel_buffers zero_grad_buffer sharded_state_dict"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer": "numel numel_unpadded buckets grad_data",
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucket": "numel_unpadded grad_data",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "param_groups zero_grad prepare_grads get_main_grads_for_grad_norm get_grad_stats_parallel_group "
        "get_parameters is_stub_optimizer config model_chunks step_with_ready_grads optimizer sharded_state_dict "
        "load_state_dict reload_model_params model_param_group_index_map _set_main_param_and_optimizer_states"
    ),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": (
        "chained_optimizers param_groups zero_grad prepare_grads get_grad_stats_parallel_group sharded_state_dict "
        "load_state_dict reload_model_params"
    ),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig": (
        "use_precision_aware_optimizer use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    ),
    # The names by which our own in its place is called.
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer": (
        "sub_optimizers dummy_step update_fp32_param_by_new_param _sync_hdo_state_to_sub_optimizers"
    ),
    "megatron.core.models.gpt.gpt_model.GPTModel": (
        "pg_collection decoder embedding output_layer shared_embedding_or_output_weight sharded_state_dict "
        "_is_in_embd_group"
    ),
    "megatron.core.process_groups_config.ProcessGroupCollection": "tp cp ep expt_tp",
    "megatron.core.transformer.transformer_block.TransformerBlock": "layers",
    "megatron.core.transformer.transformer_layer.TransformerLayer": "layer_number mlp",
    "megatron.core.transformer.moe.moe_layer.MoELayer": "router",
    "megatron.core.transformer.moe.router.TopKRouter": (
        "weight topk score_function expert_bias router_replay routing tp_cp_group tp_dp_cp_group"
    ),
    "megatron.core.tensor_parallel.ColumnParallelLinear": "weight sequence_parallel tp_group",
    "megatron.core.packed_seq_params.PackedSeqParams": "cu_seqlens_q_padded",
    "megatron.core.transformer.transformer_config.TransformerConfig": (
        "calculate_per_token_loss finalize_model_grads_func hidden_size layernorm_epsilon num_layers num_moe_experts "
        "layernorm_zero_centered_gamma moe_grouped_gemm moe_layer_freq multi_latent_attention params_dtype "
        "qk_layernorm sequence_parallel use_cpu_initialization window_attn_skip_freq window_size"
    ),
}

ROOTS = {
    "engines/vllm/engine.py": (
        "self.llm self.engine self.engine.model_executor self.engine.model_executor.driver_worker "
        "self.engine.model_executor.driver_worker.worker self.engine.engine_core self.runner output part"
    ),
    "engines/vllm/lora.py": "self.manager runner wrapper module",
    "engines/vllm/options.py": "runner",
    "engines/vllm/start.py": "group",
    "engines/sglang/server/__main__.py": "self.engine self.tokenizer_manager engine result",
    "engines/sglang/server/draws.py": "self info processor result batch r logits_output Sampler SamplingBatchInfo",
    "engines/sglang/server/inside.py": "runner request Manager WeightUpdater BaseTpWorker ModelConfig",
    "policy/megatron/training.py": "self.optimizer each buffer bucket settings config b",
    "policy/megatron/repairs.py": "self",
    "policy/megatron/layers.py": "config",
    "policy/megatron/attention.py": "config packed_seq_params",
}
"""File of ours -> names of foreign objects there, whose attributes are all in the tables."""

TORCHS = "parameters named_parameters state fill lengths order runs"
"""Attributes of those objects that belong to torch, numpy or our own code."""

CALLS = {
    "vllm.LLM.sleep": "level",
    "vllm.LLM.wake_up": "tags",
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": "lora_request",
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request": "",
}
"""Method -> keywords that we pass."""
