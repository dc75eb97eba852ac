"""Settings every test runs under: no network, quiet libraries, one CPU thread."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch

if not torch.cuda.is_available():
    # kernels run through Triton's interpreter; read when Triton is first imported, by whomever
    os.environ["TRITON_INTERPRET"] = "1"

# tiny tensors gain nothing from more threads, and spinning ones slow each other down
torch.set_num_threads(1)
