"""Data order: a pure function of (seed, epoch, position), on any number of ranks, across stops (C21, R15)."""

import itertools

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from alignment.batches import Group
from alignment.errors import UserError
from alignment.randomness import permutation
from datamodules.loader import BatchOrder, SampleOrder, StatefulLoader


def groups(count, lengths=None):
    sizes = lengths or [1 + i % 5 for i in range(count)]
    return [Group(prompt=[1], completions=[[7] * sizes[i]], index=i) for i in range(count)]


def make(count, batch_size, *, rank=0, ranks=1, seed=5, workers=0, data=None, **order):
    data = groups(count) if data is None else data
    shuffle = order.pop("shuffle", True)
    sampler = SampleOrder(len(data), seed=seed, shuffle=shuffle)
    batches = BatchOrder(sampler, batch_size=batch_size, rank=rank, world_size=ranks, **order)
    return StatefulLoader(data, batches, num_workers=workers)


def ids(batch):
    return batch.group_index.tolist()


def epoch_of(loader, epoch):
    loader.batch_sampler.sampler.set_epoch(epoch)
    return [ids(batch) for batch in loader]


def test_order_is_the_permutation_of_seed_and_epoch():
    loader = make(10, 4)
    for epoch in (0, 1, 7):
        order = permutation(5, epoch, 10).tolist()
        assert epoch_of(loader, epoch) == [order[:4], order[4:8], order[8:]]
    assert len(loader) == 3
    assert epoch_of(make(10, 4, shuffle=False), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_out_the_short_batch():
    loader = make(10, 4, drop_last=True)
    assert len(loader) == 2
    assert epoch_of(loader, 0) == epoch_of(make(10, 4), 0)[:2]
    assert len(make(8, 4, drop_last=True)) == 2


@pytest.mark.parametrize(("ranks", "last"), [(2, [2, 1]), (3, [1, 1, 1]), (5, [1, 1, 1, 0, 0])])
def test_ranks_share_each_batch(ranks, last):
    whole = epoch_of(make(11, 4), 2)
    shares = [epoch_of(make(11, 4, rank=r, ranks=ranks), 2) for r in range(ranks)]
    for b, batch in enumerate(whole):
        dealt = [share[b] for share in shares]
        together = [x for x in itertools.chain(*itertools.zip_longest(*dealt)) if x is not None]
        assert together == batch
    assert [len(share[-1]) for share in shares] == last


def test_a_rank_without_rows_gets_an_empty_batch():
    loader = make(5, 4, rank=3, ranks=4, shuffle=False)
    last = list(loader)[-1]
    assert (last.num_prompts, last.num_completions, len(last.completion_ids)) == (0, 0, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_resumed_equals_uninterrupted(stop, workers):
    """Stop after `stop` batches of epoch 1 of 3 batches; the rest of the run must be the same."""
    straight = [epoch_of(make(10, 4), e) for e in (0, 1, 2)]
    loader = make(10, 4, workers=workers)
    assert epoch_of(loader, 0) == straight[0]
    loader.batch_sampler.sampler.set_epoch(1)
    iterator = iter(loader)
    assert [ids(next(iterator)) for _ in range(stop)] == straight[1][:stop]
    state = loader.state_dict()
    later = make(10, 4, workers=workers)
    later.load_state_dict(state)
    assert later.state_dict() == state
    if stop == 0:  # nothing was asked of epoch 1 yet: the state still says that epoch 0 ended
        assert [ids(b) for b in later] == straight[1]
    elif stop == 3:  # at the end: a plain loop goes on with the next epoch by itself
        assert [ids(b) for b in later] == straight[2]
    else:
        assert [ids(b) for b in later] == straight[1][stop:]
    if stop != 3:
        assert epoch_of(later, 2) == straight[2]


def test_stopping_five_times_inside_an_epoch():
    straight = epoch_of(make(23, 4), 3)
    seen, state = [], None
    for _ in range(6):
        loader = make(23, 4)
        if state is None:
            loader.batch_sampler.sampler.set_epoch(3)
        else:
            loader.load_state_dict(state)
        seen.append(ids(next(iter(loader))))
        state = loader.state_dict()
    assert seen == straight


def test_two_one_two_processes_see_the_same_samples():
    straight = epoch_of(make(22, 4), 1)
    seen: list[list[int]] = []
    state = {"epoch": 1, "batches": 0, "batch_size": 4, "size": 22, "seed": 5}
    for ranks, count in ((2, 2), (1, 2), (2, 2)):
        loaders = [make(22, 4, rank=r, ranks=ranks) for r in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(count):
            seen.append(sorted(i for iterator in iterators for i in ids(next(iterator))))
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)  # one state serves every rank
        state = states[0]
    assert seen == [sorted(batch) for batch in straight]


def test_an_epoch_cut_short_does_not_leak_into_the_next():
    """limit_train_batches leaves an iterator in the middle; a Trainer then sets the next epoch."""
    loader = make(10, 4)
    next(iter(loader))
    assert epoch_of(loader, 1) == epoch_of(make(10, 4), 1)
    next(iter(loader))
    resumed = make(10, 4)
    resumed.load_state_dict(loader.state_dict())
    assert epoch_of(resumed, 2) == epoch_of(make(10, 4), 2)


def test_iterators_made_before_the_epoch_is_set_follow_it():
    loader = make(10, 4, workers=1)
    iterator = iter(loader)
    loader.batch_sampler.sampler.set_epoch(6)
    assert [ids(b) for b in iterator] == epoch_of(make(10, 4), 6)


def test_other_data_in_the_middle_of_an_epoch_is_an_error():
    loader = make(10, 4)
    next(iter(loader))
    middle = loader.state_dict()
    for other in (make(10, 5), make(11, 4), make(10, 4, seed=6)):
        with pytest.raises(UserError, match="stands in the middle of epoch 0"):
            other.load_state_dict(middle)
    list(loader)
    end = loader.state_dict()
    other = make(11, 5)
    other.load_state_dict(end)
    assert [ids(b) for b in other] == epoch_of(make(11, 5), 1)


def test_loading_disturbs_no_global_randomness():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(make(10, 4))
    assert torch.equal(before, torch.get_rng_state())


def test_length_aware_batches_are_alike_complete_and_deterministic():
    lengths = torch.randint(1, 200, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    data = groups(100, lengths)
    aware = {"data": data, "lengths": np.array(lengths)}
    batches = epoch_of(make(100, 8, **aware), 1)
    assert sorted(i for b in batches for i in b) == list(range(100))
    assert [len(b) for b in batches] == [8] * 12 + [4]
    assert batches == epoch_of(make(100, 8, **aware), 1)
    assert batches != epoch_of(make(100, 8, **aware), 2)

    def padding(parts):
        return sum(max(lengths[i] for i in b) * len(b) - sum(lengths[i] for i in b) for b in parts)

    assert padding(batches) < padding(epoch_of(make(100, 8, data=data), 1)) / 4
    shares = [epoch_of(make(100, 8, rank=r, ranks=2, **aware), 1) for r in (0, 1)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(b) for b in batches]


def test_sizes_that_make_no_sense():
    with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
        BatchOrder(SampleOrder(3), batch_size=0)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        BatchOrder(SampleOrder(3), batch_size=1, rank=2, world_size=2)


# ---------------------------------------------------------------------- under Lightning


class Recorder(L.LightningModule):
    """Notes which rows it was given; one scalar parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, ids(batch)))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        assert batch.num_prompts

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(Callback):
    """Write a checkpoint after `step` optimizer steps, at the end of the batch or of the epoch."""

    def __init__(self, step, path, at_epoch_end=False):
        self.step, self.path, self.at_epoch_end = step, path, at_epoch_end

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and not self.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, *_):
        if trainer.global_step == self.step and self.at_epoch_end:
            trainer.save_checkpoint(self.path)


def run(callbacks=(), resume=None, workers=0, validate=False, **trainer):
    options = {
        **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "max_epochs": 3, "num_sanity_val_steps": 0, **trainer},
    }
    model = Recorder()
    val = make(3, 2, shuffle=False) if validate else None
    L.Trainer(callbacks=list(callbacks), **options).fit(model, make(10, 4, workers=workers), val, ckpt_path=resume)
    return model.seen


STRAIGHT = [(e, batch) for e in range(3) for batch in epoch_of(make(10, 4), e)]


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    ("step", "at_epoch_end"), [(1, False), (3, False), (3, True), (4, False), (5, False), (6, True)]
)
def test_c21_lightning_resumes_with_the_next_batch(tmp_path, step, at_epoch_end, validate):
    path = tmp_path / "x.ckpt"
    assert run([SaveAfter(step, path, at_epoch_end)], validate=validate) == STRAIGHT
    assert [batch for _, batch in run(resume=path, validate=validate)] == [batch for _, batch in STRAIGHT[step:]]


def test_c21_resume_with_workers_and_limited_epochs(tmp_path):
    path = tmp_path / "x.ckpt"
    limited = [(e, batch) for e, batch in STRAIGHT if batch in epoch_of(make(10, 4), e)[:2]]
    assert run([SaveAfter(2, path, at_epoch_end=True)], workers=1, limit_train_batches=2) == limited
    assert run(resume=path, workers=1, limit_train_batches=2) == limited[2:]


def test_overfit_and_fast_dev_run():
    # A Trainer asks a data module for a fixed order under overfit_batches; a loader of one's own keeps its order.
    assert len(run(overfit_batches=2)) == 6
    assert run(fast_dev_run=True, max_epochs=1) == STRAIGHT[:1]
