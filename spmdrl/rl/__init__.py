"""Reinforcement learning: samples the experience of each step, scores it, and updates the models.

run.py           one run and its learning method, policy gradients
build.py         builds a run: prompts, models, checkpoints, engine
sampler.py       samples the experience of steps, some of them in advance
rollout_plan.py  plans of rollouts, and the experience that results from them
rollout.py       one rollout: takes prompts, samples responses, passes on observations, collects rewards
engine_models.py loads frozen models into the run's engine
engine_judges.py judges on the run's engine
grade.py         passes episodes to the reward function and collects their rewards
environment.py   the interface of environments that the policy acts in, and the environment of single-turn episodes
agents.py        conversations with environments in worker processes
conversation_state.py  the state of an episode's conversation, from which another step or process can continue it
fill_batch.py    collects the results of rollouts until a step has enough prompts
evaluation.py    measures the policy on a prompt set
score.py         computes inputs of the update: shaped rewards, old and reference logp, values
reading.py       scores responses with a reward model, also step by step and with several labels
retokenize.py    converts responses to the tokens of a reward model or of a teacher
update.py        updates every model that learns
online_preference.py  the method that learns from pairs of the policy's samples
teachers.py      the teachers' prompts, and teachers in the run's engine
alignment.py     distillation from a teacher with another tokenizer
distillation.py  the method of distillation: the teachers' logp, responses of the data set
compose.py       creates the Algorithm of a run from its settings
spikes.py        saves the batch of an anomalous optimizer step
tool_calls.py    the format of the policy's tool calls, and the calls in an episode's turns
describe.py      metrics of a step, and a few of its samples as text
state.py         saves and restores the state of a run and of each rank in checkpoints
"""
