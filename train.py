"""`accelerate launch train.py --config configs/….yaml key.sub=value`: distil a draft.

The logic is in `dspark.training.program`; `accelerate launch -m dspark train …` is the same thing.
"""

from dspark.training.program import process

if __name__ == "__main__":
    process()
