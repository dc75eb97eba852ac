"""Decoding one prompt with target and draft: the very loop that training, evaluation, export
check and server share."""

from dspark.decoding.calibration import Outcomes, fit_temperatures, measures, reliability
from dspark.decoding.logprobs import MAX_TOP_LOGPROBS, Logprob
from dspark.decoding.loop import Commit, Completion, DecodeParams, check_request, decode, stream
from dspark.decoding.nextn import NextNDraft, nextn_draft, nextn_proposals
from dspark.decoding.plain import decode_plain
from dspark.decoding.prefix import PrefixCache, read_prompt
from dspark.decoding.proposer import draft_limit
from dspark.decoding.reference_step import (
    Draft,
    ReferenceStep,
    StepResult,
    Verification,
    proposal_limit,
)
from dspark.decoding.replay import replay
from dspark.decoding.sampling import SamplingParams
from dspark.decoding.simulated import accept_schedule

__all__ = [
    "MAX_TOP_LOGPROBS",
    "Commit",
    "Completion",
    "DecodeParams",
    "Draft",
    "Logprob",
    "NextNDraft",
    "Outcomes",
    "PrefixCache",
    "ReferenceStep",
    "SamplingParams",
    "StepResult",
    "Verification",
    "accept_schedule",
    "check_request",
    "decode",
    "decode_plain",
    "draft_limit",
    "fit_temperatures",
    "measures",
    "nextn_draft",
    "nextn_proposals",
    "proposal_limit",
    "read_prompt",
    "reliability",
    "replay",
    "stream",
]
