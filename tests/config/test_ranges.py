"""Values that no step can use are refused by the flags alone, with the name of the flag."""

import pytest
from command_lines import read

from dschat_ppo.errors import UserError

# step -> flag=value
CASES = {
    "ppo": """
        gamma=1.1 gae_lambda=-0.1 clip_eps=0 value_clip_eps=-1 kl_coef=-0.1 reward_clip=-1
        missing_eos_penalty=-1 entropy_coef=-1 temperature=0 top_p=0 top_p=1.1 top_k=-1 min_p=1
        min_p=-0.1 repetition_penalty=0 n_samples_per_prompt=0 rollout_rows=-1 rollout_engine=fast
        old_logprobs=never min_answer_seq_len=-1 min_answer_seq_len=257 stop_token_ids=-1
        stop_token_ids=x stop_strings= micro_batch_tokens=-1 ppo_epochs=0 generation_batches=0
        per_device_generation_batch_size=0 per_device_training_batch_size=0 max_prompt_seq_len=0
        max_answer_seq_len=0 actor_learning_rate=0 critic_learning_rate=-1 actor_learning_rate=1e6
        critic_learning_rate=1.5
        actor_dropout=1.0 critic_dropout=-0.5 print_answers_interval=0 sample_interval=-1
        actor_zero_stage=5 test_stop_step=3 test_stop_step=-1
        reward_timeout=1e7 remote_reward_timeout=1e7 adam_epsilon=1e-300
        clip_eps=1 dual_clip=0.5 high_entropy_share=0 process_reward=max
         ref_sync_interval=-1
        actor_lora_learning_rate=1.5 critic_lora_learning_rate=1.5
    """,
    "reward": """
        objective=ppo simpo_gamma=-1 kto_desirable_weight=0 kto_undesirable_weight=-1
        step_separator= center_rewards_coef=-0.1 center_rewards_coef=nan beta=0 beta=-0.1 beta=inf
        label_smoothing=-0.1 nll_coef=0 nll_coef=-1 max_seq_len=-5 learning_rate=1e6
    """,
    "sft": """
        collective_timeout=0.9 collective_timeout=1e9 per_device_train_batch_size=0
        per_device_eval_batch_size=-1 gradient_accumulation_steps=0 max_seq_len=0 learning_rate=0
        learning_rate=nan learning_rate=fast learning_rate=1.01 learning_rate=1e6
         adam_beta1=-0.1
         adam_beta2=1 adam_epsilon=0 adam_epsilon=1e-300
         adam_epsilon=2 num_train_epochs=0 num_train_epochs=nan
         weight_decay=-0.1 num_warmup_steps=-1 max_grad_norm=-1
        eval_interval=-1 eval_iters=-1 dropout=1 eval_fraction=1 eval_fraction=-0.1 zero_stage=4
        dtype=int8 lr_scheduler_type=step truncation=sideways seed=-1 data_split=2,4
        data_split=0,0,0 data_split=1,-1,1 data_split=a,b,c data_split=inf,1,1
        preprocessing_num_workers=0 data_format=parquet
        warmup_ratio=1 min_lr_ratio=-0.1 max_steps=-1 lora_dim=-1 lora_alpha=0
        lora_alpha=-1 lora_dropout=1 lora_dropout=-0.1 lora_learning_rate=0 lora_learning_rate=1.5
    """,
}


@pytest.mark.parametrize(("step", "case"), [(step, case) for step, text in CASES.items() for case in text.split()])
def test_a_value_out_of_range_is_refused(step, case):
    name, _, value = case.partition("=")
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)
