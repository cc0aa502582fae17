"""The data of a run: prompts, episodes, packed batches, micro-batches.

sources.py        reads rows from files, HF datasets, reasoning-gym and built-in tasks
builtin.py        the built-in tasks
rowfiles.py       reads rows that need not fit in memory: files by index, and streams
mixture.py        the order of prompts and rows, and mixtures of sources with weights
prompts.py        the prompts of a run
prompt_columns.py puts columns of a row into its prompt, and leaves others to rewards
dialogues.py      reads rows of supervised data as dialogues or text
preferences.py    reads rows of preference data as pairs or labelled responses
steps.py          steps of a response, and rows of steps with labels
row_columns.py    reads further columns of a row, and lists those that nothing reads
chat.py           chooses the chat template, and renders and tokenizes a prompt
rendering.py      renders dialogues by a chat template
turns.py          finds the text that an assistant generates in a rendered dialogue
turn_end.py       finds the control token that ends a turn
shown.py          checks that a template shows turns, tools and variables
template_ends.py  the tokens by which a chat template ends an assistant's turn
tokens.py         tokens of a rendered dialogue with a loss mask
conversation.py   tokens of a conversation around those that a policy samples
turn_tail.py      finds the text between an assistant's turn and the next prompt
controls.py       separates the text of messages from control tokens
segment.py        tokens of an episode that were sampled or observed together
episode.py        one sample of a prompt: a tree of segments, and its reward
scores.py         scores of answers and of puzzles
batch.py          many episodes packed end to end
pack.py           packs the paths of episodes into a batch, and unpacks them
step_batch.py     makes the batch of a step: columns, replayed sequences, optimizer steps
distribute.py     distributes a batch over ranks and optimizer steps
microbatch.py     forms micro-batches up to a token budget
tree.py           shares the computation of tokens that samples of a prompt or paths of an episode have in common
"""
