"""Jobs that learn from given data: supervised fine-tuning, preference learning, reward models.

run.py           runs the steps of one job
entry.py         reads rows before ranks meet; finds the number of steps and a missing chat template
build.py         builds a job: rows, model, checkpoints, engine
sft.py           the parts of supervised fine-tuning
preference.py    the parts of preference learning; log p of the reference, computed before the first step
reward_model.py  the parts of the training of a reward model
rows.py          draws and encodes the rows of each step
encoder.py       turns a row into tokens with a loss mask
stored.py        numbers of the rows' tokens in files, written before any model learns
teacher.py       writes a teacher's likeliest tokens into files
stored_teacher.py  reads them in the teacher's place
pair_encoder.py  turns a row of preference data into sequences
steps.py         turns a row of labelled steps into a sequence
generations.py   answers of the model during the job
preview.py       describes the first rows, for a dry run
"""
