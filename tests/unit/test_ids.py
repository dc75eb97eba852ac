"""Which ids a tokenizer knows, where they have gaps too."""

from dspark.corpus.ids import id_limit
from dspark.target.config import LingConfig
from dspark.target.ling_chat import synthetic_tokenizer
from dspark.testing import TINY_LING, tiny_tokenizer


def test_the_limit_is_one_more_than_the_highest_id() -> None:
    plain = tiny_tokenizer()
    assert id_limit(plain) == len(plain)
    gaps = synthetic_tokenizer(LingConfig.from_dict(TINY_LING["flash"]))
    assert len(gaps) < 300
    assert id_limit(gaps) == 512  # its tags stand at the end of the vocabulary
