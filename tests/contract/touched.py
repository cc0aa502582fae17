"""What our GPU paths use of other packages that no import of ours names: attributes of objects that they hand out.

`test_contract.py` looks each up in the sources of the CUDA wheels that launch/locks pins. Who touches another attribute
of a foreign object adds it here; imports, calls of what is imported, engine arguments and environment variables are
read off the code itself.
"""

VLLM = {
    "vllm.LLM": "llm_engine reset_prefix_cache sleep wake_up",
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "add_request has_unfinished_requests step abort_request model_executor engine_core"
    ),
    "vllm.v1.engine.core_client.InprocClient": "shutdown",
    "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher": "driver_worker _distributed_args",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner sleep wake_up",
    # The first where Triton is there, the second with VLLM_USE_V2_MODEL_RUNNER=0.
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "model kv_caches model_config lora_manager",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "model kv_caches model_config lora_manager",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager.LoRAModelManager": (
        "model modules packed_modules lora_index_to_id remove_adapter add_adapter activate_adapter"
    ),
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": "base_layer lora_a_stacked lora_b_stacked",
    "vllm.model_executor.models.utils.WeightsMapper": "get_rename_mapper",
    "vllm.outputs.RequestOutput": "request_id outputs finished",
    "vllm.outputs.CompletionOutput": "token_ids logprobs finish_reason routed_experts",
    "vllm.logprobs.Logprob": "logprob",
    "vllm.distributed.parallel_state.GroupCoordinator": "rank ranks",
}
"""Class -> attributes that we read, set or call."""

CALLS = {
    "vllm.LLM.sleep": "level",
    "vllm.LLM.wake_up": "tags",
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": "lora_request",
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request": "",
}
"""Method -> keywords that we give it."""
