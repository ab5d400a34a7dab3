"""Deferred construction: bitwise the plain build, at any world size, and what must be refused."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from ranks import run_ranks
from shardfit import ShardfitError, deferred, shard
from shardfit.train.init import is_deferred, take_recording
from shardfit.train.materialize import materialize


class Contrary(nn.Module):
    """Every way to initialise that a recording could get wrong."""

    def __init__(self):
        super().__init__()
        self.truncated = nn.Linear(100, 100)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02, a=-0.03, b=0.03)
        self.tail = nn.Parameter(torch.empty(90, 100))
        nn.init.trunc_normal_(self.tail, mean=2.1, std=0.5, a=-2, b=2)  # the other branch: rejection
        self.orthogonal = nn.Linear(100, 80)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.scaled = nn.Parameter(torch.randn(60, 70) * 0.1)
        self.rows = nn.Parameter(torch.zeros(50, 50))
        self.rows.data[3:9] = 2.5
        self.rows.data[11].normal_(0, 1)
        self.rows.data.mul_(0.5)
        self.overwritten = nn.Parameter(torch.zeros(50, 50))
        self.overwritten.data.normal_(0, 1)
        self.copied = nn.Linear(100, 100)
        with torch.no_grad():
            self.copied.weight.copy_(self.truncated.weight.t())
            self.copied.weight += self.orthogonal.weight.sum()
        self.from_numpy = nn.Parameter(torch.from_numpy(np.random.RandomState(0).randn(80, 80)).float())
        self.by_value = nn.Linear(64 + int(self.truncated.weight.sum().item() * 0), 64)
        angles = torch.outer(torch.arange(300).float(), 10000 ** -(torch.arange(0, 64, 2) / 64))
        self.register_buffer("rotary", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(80, 80)))
        self.register_buffer("slopes", torch.linspace(0, self.truncated.weight.max().item(), 3000))
        self.register_buffer("noise", torch.randn(3000))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.embedding = nn.Embedding(100, 64, padding_idx=3)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.sparse = nn.Parameter(torch.empty(60, 60))
        nn.init.sparse_(self.sparse, 0.1)
        self.own_generator = nn.Parameter(torch.empty(60, 60))
        self.own_generator.data.uniform_(generator=torch.Generator().manual_seed(3))
        self.lstm = nn.LSTM(32, 32, 2)
        self.attention = nn.MultiheadAttention(64, 4)
        self.plain_tensor = torch.randn(60, 60)
        self.read_by_numpy = self.truncated.weight.detach().numpy().sum()
        self.in_bf16 = nn.Linear(64, 64).to(torch.bfloat16)
        self.moved = nn.Linear(64, 64).to("cpu")
        self.permutation = torch.randperm(4000)
        self.layers = nn.ModuleList(copy.deepcopy(nn.Linear(64, 64)) for _ in range(2))
        self.conditional = nn.Linear(64, 64)
        if (self.conditional.weight > 0).any():
            nn.init.kaiming_normal_(self.conditional.weight)
        self.loaded = nn.Linear(64, 64)
        self.loaded.load_state_dict({"weight": torch.eye(64), "bias": torch.ones(64)})
        self.masked = nn.Parameter(torch.randn(60, 60))
        with torch.no_grad():
            self.masked[self.masked > 0.5] = 0.25
            self.masked.masked_fill_(self.masked < -1, -1.0)
            self.masked[torch.tensor([1, 5])] = torch.ones(60)
        self.apply(self._init_weights)
        self.truncated.weight.is_special = True

    def _init_weights(self, module):
        if type(module) is nn.Linear and module is not self.loaded and module is not self.copied:
            nn.init.normal_(module.weight, std=0.02)


def transformers_models():
    import transformers as hf

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    words = {"vocab_size": 200, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    llama = {**small, **words, "num_key_value_heads": 2}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)),
        "llama-tied-half": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**llama, tie_word_embeddings=True)
        ).half(),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **words)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, vocab_size=200)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=200)
        ),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**llama, num_local_experts=4)),
        "mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=200)
        ),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=64, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        "wav2vec2": lambda: hf.Wav2Vec2Model(
            hf.Wav2Vec2Config(
                **small,
                conv_dim=(32, 32),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            )
        ),
        "resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[2, 2], layer_type="basic")
        ),
    }


def resized():
    model = transformers_models()["gpt2"]()
    model.resize_token_embeddings(220)
    return model


BUILDERS = {"contrary": Contrary, "transformer": lambda: nn.Transformer(64, 4, 2, 2, 128), "resized": resized}
NAMES = [
    *BUILDERS,
    *(
        "llama",
        "llama-tied-half",
        "gpt2",
        "bert",
        "t5",
        "vit",
        "mixtral",
        "mamba",
        "swin",
        "wav2vec2",
        "resnet",
    ),
]


def builder(name):
    return BUILDERS[name] if name in BUILDERS else transformers_models()[name]


def build(name, *, is_deferred):
    """(model, generator state after it)"""
    torch.manual_seed(5)
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old APIs in the libraries
        if not is_deferred:
            return builder(name)(), torch.get_rng_state()
        with deferred():
            model = builder(name)()
        return model, torch.get_rng_state()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differences(plain, model):
    """What is not bitwise the same: values, dtypes, ties, buffers, plain tensor attributes."""
    ours = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    assert list(ours) == list(theirs)
    found = [
        name
        for name, value in theirs.items()
        if value.dtype != ours[name].dtype or not torch.equal(value, whole(ours[name]))
    ]
    buffers = dict(model.named_buffers())
    found += [name for name, value in plain.named_buffers() if not torch.equal(value, buffers[name])]
    for group in (theirs, ours):
        first = {}
        ties = {name: first.setdefault(id(value), name) for name, value in group.items()}
        found.append(ties)
    if found.pop() != found.pop():
        found.append("ties")
    for left, right in zip(plain.modules(), model.modules(), strict=True):
        for name, value in vars(left).items():
            if isinstance(value, torch.Tensor) and not torch.equal(value, vars(right)[name]):
                found.append(f"attribute {name}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_bitwise_the_plain_build(name):
    plain, state = build(name, is_deferred=False)
    model, deferred_state = build(name, is_deferred=True)
    assert torch.equal(state, deferred_state)
    assert is_deferred(model)
    recording = take_recording(model)
    real = [n for n, p in model.named_parameters() if p.numel() > 2048 and not p.is_meta]
    assert real == (["from_numpy"] if name == "contrary" else [])  # made of values that were there
    materialize(model, recording, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert differences(plain, model) == []


def sharded(ranks, names, by_hand):
    found = {}
    for name in names:
        plain, state = build(name, is_deferred=False)
        model, deferred_state = build(name, is_deferred=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if by_hand:
                recording = take_recording(model)
                for child in model.children():
                    if list(child.parameters()) and type(child).__name__ not in ("ModuleList", "Embedding"):
                        fully_shard(child, mesh=ranks.data_mesh)
                fully_shard(model, mesh=ranks.data_mesh)
                materialize(model, recording, device=ranks.device)
            else:
                shard(model)
        assert torch.equal(state, deferred_state)
        assert not is_deferred(model)
        found[name] = differences(plain, model)
    return found


@pytest.mark.parametrize(("world", "init"), [(1, {}), (2, {}), (4, {}), (4, {"replicate": 2})])
def test_bitwise_at_any_world_size(world, init):
    names = ["llama", "gpt2"]
    results = run_ranks(sharded, world=world, init=init, names=names, by_hand=False)
    assert results == [{name: [] for name in names}] * world


@pytest.mark.parametrize("world", [2, 4])
def test_bitwise_whatever_the_initialisation(world):
    results = run_ranks(sharded, world=world, names=["transformer", "resnet"], by_hand=False)
    assert results == [{"transformer": [], "resnet": []}] * world


def contrary_by_unit(ranks):
    plain, _ = build("contrary", is_deferred=False)
    model, _ = build("contrary", is_deferred=True)
    recording = take_recording(model)
    for name in ("truncated", "orthogonal", "lstm", "attention"):
        fully_shard(getattr(model, name), mesh=ranks.data_mesh)
    fully_shard([model.embedding, model.head], mesh=ranks.data_mesh)
    fully_shard(model, mesh=ranks.data_mesh, ignored_params=set(model.in_bf16.parameters()))
    materialize(model, recording, device=ranks.device)
    return differences(plain, model), bool(getattr(model.truncated.weight, "is_special", False))


@pytest.mark.parametrize("world", [2, 4])
def test_contrary_initialisation_in_shards(world):
    """Uneven shards and empty ones, ties, a part that is left out."""
    assert [r[0] for r in run_ranks(contrary_by_unit, world=world)] == [[]] * world


def test_attributes_of_parameters_survive():
    model, _ = build("contrary", is_deferred=True)
    recording = take_recording(model)
    assert model.truncated.weight.is_special
    materialize(model, recording, device=torch.device("cpu"))
    assert model.truncated.weight.is_special
    assert isinstance(model.truncated.weight, nn.Parameter)
    assert not hasattr(model.truncated.weight, "fake_mode")


def differing_seeds(ranks):
    torch.manual_seed(ranks.rank)
    with deferred():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    try:
        shard(model)
    except ShardfitError as error:
        return error.code, is_deferred(model)
    return None


def test_other_seeds_on_other_ranks_are_refused():
    assert run_ranks(differing_seeds) == [("SF205", True)] * 2


def test_a_forward_before_shard_says_what_to_do():
    with deferred():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ShardfitError, match=r"deferred(.|\n)*shard\(\)"):
        model(torch.ones(2, 64))


def test_cast_and_reinitialised_after_construction():
    def plain():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model.half()
        nn.init.ones_(model[1].weight)
        model[0].weight.data.mul_(2)
        return model

    torch.manual_seed(1)
    with deferred():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    weight = model[0].weight
    model.half()
    assert model[0].weight is weight
    nn.init.ones_(model[1].weight)
    model[0].weight.data.mul_(2)
    materialize(model, take_recording(model), device=torch.device("cpu"))
    assert differences(plain(), model) == []


def test_an_error_in_the_constructor_leaves_nothing_on():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), deferred():
        Broken()
    assert type(torch.empty(5000)) is torch.Tensor
    assert nn.Linear(64, 64)(torch.ones(64)).shape == (64,)


def test_one_deferral_inside_another():
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    torch.manual_seed(0)
    with deferred():
        outer = nn.Linear(64, 64)
        with deferred():
            inner = nn.Linear(64, 64)
    model = nn.ModuleList([outer, inner])
    materialize(model, take_recording(model), device=torch.device("cpu"))
    assert differences(plain, model) == []


def test_parameters_that_nothing_wrote_are_said():
    with deferred():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(64, 64))
    with pytest.warns(UserWarning, match="weight"):
        take_recording(model)


def test_a_large_tensor_that_was_read_and_changed():
    source = torch.randn(80, 80)
    with deferred():
        model = nn.Linear(80, 80)
        with torch.no_grad():
            model.weight.copy_(source)
    recording = take_recording(model)
    source.zero_()
    with pytest.raises(ShardfitError, match="changed since"):
        recording.value("weight")


def test_small_models_are_plain():
    with deferred():
        model = nn.Linear(4, 4)
    assert not is_deferred(model)
    assert take_recording(model) is None


def test_a_loop_of_reads_is_not_replayed_from_its_start():
    """Rejection sampling reads a value in each turn: replays must not grow with the square of the turns."""
    from shardfit.train import tape

    ran = []
    original = tape.Tape._run_again

    def count(self, op, *rest):
        ran.append(op)
        return original(self, op, *rest)

    def sample():
        values, turns = torch.randn(100, 100), 0
        while (values.abs() > 0.5).any():
            values = torch.where(values.abs() > 0.5, torch.randn(100, 100), values)
            turns += 1
        return values, turns

    torch.manual_seed(0)
    plain, turns = sample()
    torch.manual_seed(0)
    tape.Tape._run_again = count
    try:
        with deferred():
            values, deferred_turns = sample()
            same = torch.equal(values, plain)
    finally:
        tape.Tape._run_again = original
    assert turns == deferred_turns > 5
    assert len(ran) == len(set(map(id, ran))), "an operator ran twice"
    assert same


def test_a_buffer_that_two_modules_hold_stays_one():
    with deferred():
        model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        mask = torch.ones(80, 80).tril()
        for child in model:
            child.register_buffer("mask", mask, persistent=False)
    materialize(model, take_recording(model), device=torch.device("cpu"))
    assert model[0].mask is model[1].mask
    assert torch.equal(model[0].mask, torch.ones(80, 80).tril())


def test_a_constructor_that_chooses_a_device_is_warned_of():
    from shardfit.train.tape import Tape

    with pytest.warns(UserWarning, match="Leave the device to shard"):
        Tape(min_numel=0)._warn_of_device(torch.device("cuda"))
    Tape(min_numel=0)._warn_of_device(torch.device("cpu"))  # and nothing here


def other_arguments(ranks):
    torch.manual_seed(0)
    with deferred():
        model = nn.Linear(64, 64)
        nn.init.normal_(model.weight, std=0.02 * (1 + ranks.rank))
    try:
        shard(model)
    except ShardfitError as error:
        return error.code
    return None


def test_other_arguments_on_other_ranks_are_refused():
    assert run_ranks(other_arguments) == ["SF205"] * 2


@pytest.mark.parametrize(
    "draw", ["bernoulli_", "geometric_", "log_normal_", "cauchy_", "random_", "exponential_"]
)
def test_values_read_after_any_random_fill_are_the_real_ones(draw):
    """A fill also runs on scratch, for the generator: that must not reach what is read or replayed."""

    def sample():
        values = torch.zeros(60, 60)
        arguments = {"bernoulli_": (0.5,), "geometric_": (0.5,), "random_": (3, 90)}.get(draw, ())
        before = values.sum().item()
        getattr(values, draw)(*arguments)
        getattr(values[:7], draw)(*arguments)  # a part of it
        return values, before, values.sum().item(), torch.bernoulli(values.clamp(0, 1)).sum().item()

    torch.manual_seed(0)
    plain = sample()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with deferred():
        model = nn.Module()
        values, *numbers = sample()
        model.weight = nn.Parameter(values)
    assert torch.equal(torch.get_rng_state(), state)
    assert numbers == list(plain[1:])
    assert torch.equal(take_recording(model).value("weight"), plain[0])
