"""Reinforcement learning: a step, where its samples come from, and what is learnt from them.

run.py         everything that one run is made of
collect.py     one round: prompts, samples of the engine, rewards
experience.py  rounds until a step has its prompts; steps ahead; replay
evaluation.py  how good the policy is on a prompt set
score.py       what has to be known before the update: shaped rewards, old and reference logp, values
update.py      updates every model that learns
objectives.py  what they learn by: losses of the policy, a critic, a process reward model
algorithm.py   advantages on packed batches over all ranks, and the settings of the loss
compose.py     from settings to an Algorithm
spikes.py      keeps the batch of a step that stands out
journal.py     metrics, samples and console of a step
progress.py    checkpoints: saved after a step, taken up at the start
resume.py      what a rank holds from step to step beside its models
rehearsal.py   one step on made-up tokens: refuses settings that nothing reads
"""
