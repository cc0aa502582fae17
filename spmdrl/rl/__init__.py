"""Reinforcement learning: samples the experience of each step, scores it, and updates the models.

run.py           one run and its learning method, policy gradients
build.py         builds a run: prompts, models, checkpoints, engine
image_checks.py  refuses settings that read text only, if prompts have images
sampler.py       samples each step's experience, possibly in advance
rollout_plan.py  rollout plans, and the experience that rollouts return
rollout.py       one rollout: takes prompts, samples responses, appends observations, collects rewards
engine_models.py loads frozen models into the run's engine
engine_judges.py LLM judges on the run's engine
grade.py         sends episodes to the reward function and collects their rewards
environment.py   the interface that environments implement, and the default single-turn environment
agents.py        multi-turn conversations with environments in worker processes
conversation_state.py  the state of an episode's conversation, which later steps or processes can resume
shown_images.py  images in the messages of a conversation: reads them, names them, expands their placeholders
fill_batch.py    runs rollouts until a step has enough prompts
evaluation.py    evaluates the policy on a prompt set
score.py         computes the inputs of the update: shaped rewards, old and reference logp, values
reading.py       scores responses with a reward model, optionally per step or with several labels
retokenize.py    re-encodes responses with the tokenizer of a reward model or a teacher
update.py        updates all trained models
online_preference.py  the learning method for pairs of the policy's own samples, or for the best samples (RAFT)
teachers.py      renders the teachers' prompts, and runs teachers in the engine
alignment.py     distillation from a teacher with another tokenizer
distillation.py  the learning method for distillation: the teachers' logp, and responses from the data set
compose.py       creates the Algorithm of a run from its settings
spikes.py        saves the batch when an optimizer step is anomalous
tool_calls.py    the format of the policy's tool calls, and the calls in an episode's turns
describe.py      step metrics, and a few samples as text
trees.py         converts episodes and batches to trees of plain values for files, and back
state.py         saves and restores the run state and the per-rank state in checkpoints
"""
