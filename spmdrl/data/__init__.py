"""The data of a run: prompts, episodes, packed batches, and micro-batches.

sources.py        reads rows from files, HF datasets, reasoning-gym and built-in tasks
builtin.py        the built-in tasks
rowfiles.py       reads rows without loading them all into memory: files by index, and streams
mixture.py        draws prompts and rows in order, and mixes weighted sources
prompts.py        the prompts of a run
prompt_images.py  puts the images of a row into its prompt
prompt_values.py  reads prompt, ground truth and other values of a row
prompt_columns.py inserts row columns into the prompt, and leaves other columns to reward functions
dialogues.py      reads supervised rows as dialogues or text
preferences.py    reads preference rows as pairs or labelled responses
steps.py          splits responses into steps, and reads rows of labelled steps
images.py         finds the images and videos of a row, and their places in its messages
image_files.py    decodes images and video frames, and names images by their content
row_columns.py    reads a row's additional columns, and lists unread columns
chat.py           chooses the chat template, and renders and tokenizes a prompt
rendering.py      renders dialogues with a chat template
turns.py          finds the text that an assistant generates in a rendered dialogue
turn_end.py       finds the control token that ends a turn
shown.py          checks that a template shows turns, tools and variables
template_ends.py  finds the tokens with which a chat template ends an assistant turn
tokens.py         tokenizes a rendered dialogue and builds its loss mask
conversation.py   tokenizes the messages between a policy's sampled turns
turn_tail.py      finds the text between an assistant turn and the next prompt
controls.py       keeps message text from being parsed as control tokens
segment.py        a run of tokens that were sampled or observed together
episode.py        one sample of a prompt: a tree of segments, and its reward
scores.py         reads and computes answer scores
batch.py          many episodes packed end to end
pack.py           packs the paths of episodes into a batch, and unpacks them
step_batch.py     builds a step's batch: columns, replayed sequences, optimizer steps
distribute.py     distributes a batch over ranks and optimizer steps
microbatch.py     forms micro-batches up to a token budget
placeholders.py   marks the placeholder tokens of images in a batch
tree.py           avoids recomputing tokens shared by a prompt's samples or an episode's paths
"""
