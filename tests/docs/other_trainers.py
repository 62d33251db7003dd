"""Options of other trainers: TRL 1.16.0 (PPOConfig: 1.12.0) and OpenRLHF 0.11.2. Names alone, as they are there."""

TRL = {
    "ModelConfig": """
        model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
        lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
        load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
    """.split(),
    "SFTConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path
        dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length truncation_mode
        shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of eval_packing
        completion_only_loss assistant_only_loss loss_type activation_offloading pad_token
    """.split(),
    "RewardConfig": """
        learning_rate model_init_kwargs trust_remote_code chat_template_path disable_dropout dataset_num_proc
        eos_token max_length pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token
    """.split(),
    "DPOConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
        dataset_num_proc max_length truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs
        precompute_ref_batch_size loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef
        label_smoothing beta use_weighting discopop_tau activation_offloading sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps pad_token
    """.split(),
    "KTOConfig": """
        learning_rate train_sampling_strategy model_init_kwargs trust_remote_code router_aux_loss_coef
        disable_dropout dataset_num_proc max_length pad_to_multiple_of precompute_ref_log_probs
        precompute_ref_batch_size loss_type beta desirable_weight undesirable_weight activation_offloading
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    """.split(),
    "GRPOConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
        cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval max_completion_length
        ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size
        steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
        repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
        vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
        vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
        sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
        importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
        mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
        entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
        num_completions_to_print log_unique_prompts log_completions_hub_repo
        use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
        vllm_importance_sampling_cap
    """.split(),
    "RLOOConfig": """
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
        remove_unused_columns num_generations num_generations_eval max_completion_length
        ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size
        steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
        repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
        vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
        vllm_tensor_parallel_size beta num_iterations epsilon epsilon_high reward_weights normalize_advantages
        reward_clip_range mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        log_completions log_multimodal num_completions_to_print log_unique_prompts
        use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    """.split(),
    "PPOConfig": """
        learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
        num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty
        sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size
        local_mini_batch_size mini_batch_size push_to_hub reward_model_path model_adapter_name
        ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value
        gamma lam ds3_gather_for_generation
    """.split(),
}  # fmt: skip

OPENRLHF_SUPERVISED = """
    ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds logger.logging_steps eval.steps ckpt.path
    ckpt.max_num ckpt.max_mem ckpt.load_enable ds.use_universal_ckpt train.micro_batch_size train.batch_size
    model.gradient_checkpointing_enable ds.deepcompile train.seed train.full_determinism_enable local_rank
    ds.zero_stage ds.param_dtype ds.zpg ds.adam_offload ds.attn_implementation ds.experts_implementation
    ds.grad_accum_dtype ds.overlap_comm model.gradient_checkpointing_reentrant data.disable_fast_tokenizer
    data.dataloader_num_workers ds.tensor_parallel_size train.max_epochs model.aux_loss_coef
    model.model_name_or_path optim muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov adam.lr
    adam.betas adam.eps adam.weight_decay lr_scheduler lr_warmup_ratio min_lr_ratio max_norm ds.ring_attn_size
    ds.ring_attn_head_stride ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout
    ds.packing_samples data.dataset data.dataset_probs eval.dataset data.dataset_split eval.split
    data.max_samples data.input_template data.apply_chat_template data.tokenizer_chat_template data.max_len
    logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
    logger.tensorboard_dir use_ms
""".split()  # options of train_sft, train_rm and train_dpo
OPENRLHF = {
    "train_sft": OPENRLHF_SUPERVISED + """
        ds.use_liger_kernel model.pretrain_mode_enable data.multiturn data.input_key data.output_key
    """.split(),
    "train_rm": OPENRLHF_SUPERVISED + """
        ds.value_head_prefix model.compute_fp32_loss_enable model.margin_loss_enable model.loss_type
        data.prompt_key data.chosen_key data.rejected_key
    """.split(),
    "train_dpo": OPENRLHF_SUPERVISED + """
        ref.offload ds.use_liger_kernel model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef
        ref.model_name_or_path data.prompt_key data.chosen_key data.rejected_key
    """.split(),
    "train_ppo_ray": """
        ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_actor_ref
        actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node
        train.colocate_critic_reward train.colocate_all vllm.num_engines vllm.tensor_parallel_size
        vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep
        vllm.gpu_memory_utilization algo.advantage.is_correction_level algo.advantage.is_correction_mode
        algo.advantage.is_correction_gating algo.advantage.is_correction_threshold train.async_enable
        train.async_queue_size train.partial_rollout_enable eval.steps ckpt.save_steps logger.logging_steps
        ckpt.path ckpt.save_hf ckpt.disable_ds ckpt.max_num ckpt.max_mem ckpt.load_enable ckpt.best_metric_key
        ds.use_universal_ckpt local_rank ds.zero_stage actor.gradient_checkpointing_enable ds.deepcompile
        ds.param_dtype train.enable_ema train.ema_beta ds.zpg ds.adam_offload ds.attn_implementation
        ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm
        actor.gradient_checkpointing_reentrant data.disable_fast_tokenizer data.dataloader_num_workers
        ds.enable_sleep ds.tensor_parallel_size ds.packing_samples train.dynamic_batch_enable
        rollout.max_tokens_per_gpu train.max_tokens_per_gpu ds.load_in_4bit ds.lora.rank ds.lora.alpha
        ds.lora.target_modules ds.lora.dropout ckpt.output_dir train.num_episodes rollout.batch_size
        rollout.vllm_generate_batch_size rollout.micro_batch_size train.max_epochs data.max_len
        rollout.max_new_tokens data.max_samples actor.eps_clip actor.eps_clip_low_high actor.dual_clip
        critic.value_clip algo.advantage.lambd algo.advantage.gamma train.micro_batch_size train.batch_size
        reward.normalize_enable rollout.top_p rollout.temperature train.seed train.full_determinism_enable
        critic.freezing_steps rollout.n_samples_per_prompt critic.save_value_network algo.kl.target
        algo.kl.horizon algo.kl.init_coef actor.policy_loss_type actor.loss_agg_mode algo.kl.estimator
        algo.kl.unbiased_gradient actor.aux_loss_coef actor.entropy_coef reward.clip_range
        algo.advantage.estimator algo.kl.use_loss algo.advantage.no_std_norm reward.overlong_buffer_len
        reward.overlong_penalty_factor reward.stop_properly_penalty_coef ds.ring_attn_size
        ds.ring_attn_head_stride actor.model_name_or_path reward.model_name_or_path reward.remote_url
        critic.model_name_or_path ds.value_head_prefix ref.offload reward.offload train.agent_func_path
        data.prompt_dataset data.prompt_probs data.prompt_split eval.dataset eval.split eval.temperature
        eval.n_samples_per_prompt data.input_key data.label_key data.input_template data.apply_chat_template
        logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name
        algo.dynamic_filtering_enable algo.dynamic_filtering_range data.image_key data.max_images_per_prompt
        actor.freeze_visual_encoder logger.tensorboard_dir use_ms actor.optim actor.muon.lr
        actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov actor.muon.no_nesterov actor.adam.lr
        actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler actor.lr_warmup_ratio
        actor.min_lr_ratio actor.max_norm critic.optim critic.muon.lr critic.muon.momentum
        critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov critic.adam.lr critic.adam.betas
        critic.adam.eps critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio
        critic.min_lr_ratio critic.max_norm
    """.split(),
}  # fmt: skip
