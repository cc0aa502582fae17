"""Reinforcement learning: a step, where its samples come from, and what is learnt from them.

run.py           what one run does, step by step
build.py         builds it: prompts, models, checkpoints, engine
sampler.py       where a step's experience comes from: plan, rollout, quota
rollout_plan.py  what a rollout is asked for and what comes of it
rollout.py       one rollout: prompts, samples of the engine, observations, rewards
environment.py   what the policy acts in
quota.py         rollouts until a step has its prompts
prefetch.py      steps sampled ahead
replay_buffer.py sequences of earlier steps, and resampling
batching.py      episodes as the batch that a step learns from
evaluation.py    how good the policy is on a prompt set
score.py         what has to be known before the update: shaped rewards, old and reference logp, values
update.py        updates every model that learns
objectives.py    what they learn by: losses of the policy, a critic, a process reward model
algorithm.py     advantages on packed batches over all ranks, and the settings of the loss
compose.py       from settings to an Algorithm
spikes.py        keeps the batch of a step that stands out
describe.py      numbers that a step tells of itself, samples as text
run_state.py     state alike on all ranks, for checkpoints
rank_state.py    state of each rank, for checkpoints
trees.py         episodes as trees for a checkpoint
rehearsal.py     one step on made-up tokens: refuses settings that nothing reads
"""
