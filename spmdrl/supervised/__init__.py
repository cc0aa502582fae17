"""Jobs that learn from existing data: supervised fine-tuning, preference learning, reward models.

run.py           runs the steps of one job
entry.py         reads rows before ranks connect: computes the number of steps and adds a missing chat template
build.py         builds a job: rows, model, checkpoints, engine
sft.py           builds supervised fine-tuning
preference.py    builds preference learning, optionally with the reference's log p precomputed into files
reward_model.py  builds reward-model training
rows.py          draws and encodes the rows of each step
encoder.py       turns a row into tokens with a loss mask
stored.py        writes and reads files of per-token values, such as log p
teacher.py       writes a teacher's most likely tokens into files
stored_teacher.py  reads a teacher's files during training instead of running the teacher
pair_encoder.py  turns a row of preference data into sequences
steps.py         turns a row of labelled steps into a sequence
generations.py   samples answers from the trained model during the job
preview.py       describes the first rows, for a dry run
"""
