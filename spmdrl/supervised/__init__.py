"""Jobs that learn from given data: supervised fine-tuning, preference learning, reward models.

run.py           runs the steps of one job
entry.py         reads rows before ranks connect: computes the number of steps, adds a missing chat template
build.py         builds a job: rows, model, checkpoints, engine
sft.py           builds supervised fine-tuning
preference.py    builds preference learning, with files of the log p of the reference if it is computed in advance
reward_model.py  builds the training of a reward model
rows.py          draws and encodes the rows of each step
encoder.py       turns a row into tokens with a loss mask
stored.py        writes and reads files of numbers, such as log p, for the tokens of rows
teacher.py       writes a teacher's most likely tokens into files
stored_teacher.py  reads a teacher's files during training, instead of running the teacher
pair_encoder.py  turns a row of preference data into sequences
steps.py         turns a row of labelled steps into a sequence
generations.py   samples answers of the trained model during the job
preview.py       describes the first rows, for a dry run
"""
