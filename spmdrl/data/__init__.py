"""The data of a run: prompts, episodes, packed batches, micro-batches.

sources.py     rows from files, HF datasets, reasoning-gym and built-in tasks
reasoning.py   scores of reasoning-gym puzzles
builtin.py     the built-in tasks
chat.py        turns a prompt or chat messages into tokens
dialogues.py   reads rows of supervised data as dialogues or text
preferences.py reads rows of preference data as pairs or labelled responses
step_rows.py   reads rows of responses whose steps have labels
steps.py       where the steps of a response end
row_columns.py reads columns beside the dialogue, and names those that nothing reads
prompt_columns.py columns that go into a prompt, and those of the same names that are left to rewards
rendering.py   renders dialogues by a chat template
turns.py       finds the text that an assistant generates in a rendered dialogue, and proves it
turn_end.py    finds what ends a turn
turn_shown.py  checks that a turn is shown whole
unshown.py     finds tools and variables that a chat template does not show
marked_turns.py finds turns by the marks of a template
template_ends.py the tokens by which a chat template ends an assistant's turn
tokens.py      tokens of a rendered dialogue with a loss mask
conversation.py tokens of a conversation between those that a policy samples
turn_tail.py   finds and proves the text between an assistant's turn and the next prompt
controls.py    keeps the text of messages apart from control tokens
rowfiles.py    rows that need not fit in memory: files by index, streams
mixture.py     the order of the rows of a supervised job, with weights
prompts.py     the prompts of a run
prompt_text.py puts columns of a row into the texts of --data.template and --data.prefill
order.py       the order in which prompts are drawn, by seed and count
segment.py     tokens of an episode that were sampled or observed together
episode.py     one sample of a prompt: a tree of segments, and its reward
paths.py       the paths of an episode that branches
scores.py      scores as user code gives them; keys.py names a sample in messages
batch.py       packs many episodes end to end
dealing.py     divides a batch among ranks and optimizer steps
step_batch.py  makes the batch of a step: columns, replayed sequences, optimizer steps
replay_buffer.py sequences of earlier steps, and resampling
packing.py     forms micro-batches up to a token budget
tree.py        computes once the tokens that samples of a prompt or paths of an episode share
"""
