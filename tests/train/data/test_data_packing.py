"""Labels and document starts of a packed sequence, by hand."""

import torch

from d9d_train.batch import IGNORED, Batch
from d9d_train.data.order import split
from d9d_train.data.sample import packed

X = IGNORED


def pack(tokens, begins, counted=None):
    def flags(text):
        return torch.tensor([c == "1" for c in text])

    sample = packed(
        torch.tensor(tokens), flags(begins), None if counted is None else flags(counted)
    )
    return sample.tokens.tolist(), sample.labels.tolist(), sample.starts.tolist()


def test_one_document():
    assert pack([5, 6, 7, 8], "1000") == ([5, 6, 7], [6, 7, 8], [0, 0, 0])


def test_a_document_that_goes_on_from_the_sequence_before_starts_anew():
    assert pack([5, 6, 7, 8], "0000") == ([5, 6, 7], [6, 7, 8], [0, 0, 0])


def test_the_last_token_of_a_document_predicts_nothing():
    tokens, labels, starts = pack([1, 2, 9, 3, 9, 4, 5], "1001010")
    assert tokens == [1, 2, 9, 3, 9, 4]
    assert labels == [2, 9, X, 9, X, 5]
    assert starts == [0, 0, 0, 3, 3, 5]


def test_a_document_that_ends_with_the_sequence():
    assert pack([1, 9, 2], "101") == ([1, 9], [9, X], [0, 0])


def test_documents_of_one_token():
    assert pack([1, 2, 3, 4], "1111") == ([1, 2, 3], [X, X, X], [0, 1, 2])


def test_a_mask_is_of_tokens_to_be_predicted():
    # Prompt 1 2 3, answer 4 5: the last token of the prompt predicts the first of the answer.
    assert pack([1, 2, 3, 4, 5], "10000", "00011")[1] == [X, X, 4, 5]
    assert pack([1, 2, 3, 4, 5], "10010", "00011")[1] == [X, X, X, 5]


def test_positions_restart_in_every_document_on_every_cp_rank():
    sample = packed(torch.arange(9), torch.tensor([c == "1" for c in "100100010"]))
    full = Batch(
        tokens=sample.tokens[None],
        labels=sample.labels[None],
        index=torch.arange(8),
        starts=sample.starts[None],
        samples=torch.tensor([0]),
        packed=True,
    )
    assert full.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    part = split(full, torch.tensor([2, 3, 4, 5]))
    assert part.tokens.tolist() == [[2, 3, 4, 5]]
    assert part.labels.tolist() == [[X, 4, 5, 6]]
    assert part.positions.tolist() == [[2, 0, 1, 2]]
