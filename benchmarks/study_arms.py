"""The arms of the study, as settings of `dspark train`; rows, order and first weights are the same.

PYTHONPATH=. python benchmarks/study_arms.py stock    # one line, for train/acceptance_length.sh
"""

import sys

STOCK = "loss.accept_length_weight=0"
CE_ONLY = f"loss.ce_weight=1 loss.l1_weight=0 {STOCK}"
NO_MARKOV = "draft.markov_rank=0"
# a short training more of the released draft, which is far from its first steps
TUNED = (
    "draft.init_from=checkpoints/smollm2-135m-dspark-block16 train.steps=300 train.lr=3e-4"
    " train.batch_size=12 loss.chunk_blocks=192"
)

ARMS = {
    # 2x2 of Markov head and loss; the confidence head reads no Markov embedding where there is none
    "dflash": f"{NO_MARKOV} {CE_ONLY}",
    "ce": CE_ONLY,
    "stock-nomarkov": f"{NO_MARKOV} {STOCK}",
    "stock": STOCK,
    # the term, from the start and on a draft half-way
    "acc025": "loss.accept_length_weight=0.25",
    "acc050": "loss.accept_length_weight=0.5",
    "acc100": "loss.accept_length_weight=1.0",
    "late100": "loss.accept_length_weight=1.0 loss.accept_length_start=0.5",
    "late400": "loss.accept_length_weight=4.0 loss.accept_length_start=0.5",
    # forms of it
    "path050": "loss.accept_length_weight=0.5 loss.accept_length_form=path",
    "exact050": "loss.accept_length_weight=0.5 loss.accept_length_form=path_exact",
    "exact200": "loss.accept_length_weight=2.0 loss.accept_length_form=path_exact",
    "chain100": "loss.accept_length_weight=1.0 loss.accept_length_form=chain",
    "focal": "loss.accept_length_weight=0.5 loss.accept_length_focal=4.8",
    "chain400": "loss.accept_length_weight=4.0 loss.accept_length_form=chain",
    "chain-focal": "loss.accept_length_weight=1.0 loss.accept_length_form=chain"
    " loss.accept_length_focal=2.4",
    "sharp100": "loss.accept_length_weight=1.0 loss.accept_length_temperature=0.5",
    "greedy200": "loss.accept_length_weight=2.0 loss.accept_length_temperature=0.1",
    # late, on the released draft; L_acc is divided by twice the slots here
    "tuned-stock": f"{TUNED} {STOCK}",
    "tuned-acc100": f"{TUNED} loss.accept_length_weight=1.0",
    "tuned-acc400": f"{TUNED} loss.accept_length_weight=4.0",
    "tuned-acc1600": f"{TUNED} loss.accept_length_weight=16.0",
    "tuned-sharp400": f"{TUNED} loss.accept_length_weight=4.0 loss.accept_length_temperature=0.5",
    "tuned-greedy400": f"{TUNED} loss.accept_length_weight=4.0 loss.accept_length_temperature=0.1",
    "tuned-exact400": f"{TUNED} loss.accept_length_weight=4.0 loss.accept_length_form=path_exact",
    "tuned-chain100": f"{TUNED} loss.accept_length_weight=1.0 loss.accept_length_form=chain",
    # other slot-wise losses
    "dpace": f"{STOCK} loss.slot_weights=survival",
    "lk": f"{STOCK} loss.distance=lk_hybrid",
    "lk-acc100": "loss.accept_length_weight=1.0 loss.distance=lk_hybrid",
    "lk-chain400": "loss.accept_length_weight=4.0 loss.accept_length_form=chain"
    " loss.distance=lk_hybrid",
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ARMS:
        print(f"usage: study_arms.py ARM, one of {', '.join(ARMS)}", file=sys.stderr)
        raise SystemExit(0 if "--help" in sys.argv else 2)
    print(ARMS[sys.argv[1]])
