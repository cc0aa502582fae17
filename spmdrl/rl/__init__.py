"""Reinforcement learning: a step, the sources of its samples, and the updates that learn from them.

run.py           runs the steps of one run by a learning method: policy gradients
build.py         builds a run: prompts, models, checkpoints, engine
sampler.py       samples a step's experience, also ahead: plan, rollout, grade, fill the batch
rollout_plan.py  plans of rollouts, and the experience that comes of them
rollout.py       one rollout: prompts, samples of the engine, observations, rewards
engine_models.py frozen models in the run's own engine
engine_judges.py judges on the run's own engine
grade.py         episodes on their way through the reward function
environment.py   contract of environments that the policy acts in; single turns; what an engine's ranks share
agents.py        conversations with environments in worker processes
conversation_state.py  the state of an episode's conversation, which a later step or another process takes up
fill_batch.py    counts what the rollouts of a step bring until it has its prompts
evaluation.py    measures the policy on a prompt set
score.py         computes inputs of the update: shaped rewards, old and reference logp, values
reading.py       how a reward model reads responses: tokens, steps, labels
retokenize.py    responses in the tokens of a reward model or of a teacher
update.py        updates every model that learns
online_preference.py  the method of pairs of own samples: which samples of a prompt are compared
teachers.py      prompts as teachers read them, and teachers in the run's own engine
alignment.py     a teacher that reads other tokens
distillation.py  the method of distillation: what teachers say of a batch, responses of the data set
compose.py       makes an Algorithm from settings
spikes.py        keeps the batch of an anomalous optimizer step
tool_calls.py    the form in which the policy calls tools; calls in an episode's turns, for its row of samples.jsonl
describe.py      metrics of a step, and a few of its samples as text
state.py         state of a run and of each rank, for checkpoints; episodes as trees
"""
