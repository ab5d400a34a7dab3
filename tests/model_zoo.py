"""Tiny models of many kinds, each with a batch of four: what plans and shards have to cope with."""

from __future__ import annotations

import warnings

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head; tied or not; a position table of the root's own."""

    def __init__(self, *, dim=16, depth=3, vocab=40, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(8, dim) * 0.1)
        self.layers = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def encode(self, tokens):
        return self.norm(self.embed(tokens)).mean(1)

    def generate(self, tokens):
        """Calls the model again and again, and uses parameters of the root between."""
        for _ in range(3):
            logits = self(tokens)
            tokens = torch.cat([tokens[:, 1:], logits[:, -1:].argmax(-1)], 1)
        return logits + self.positions.mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.rnn = nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 40)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Translator(nn.Module):
    """As in PyTorch's tutorial: embeddings and generator after the transformer."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(16, 40)
        self.source = nn.Embedding(40, 16)
        self.target = nn.Embedding(40, 16)

    def forward(self, tokens):
        return self.generator(self.transformer(self.source(tokens), self.target(tokens)))


class Experts(nn.Module):
    def __init__(self, dim=16, count=4):
        super().__init__()
        self.gate = nn.Linear(dim, count)
        self.experts = nn.ModuleList([Block(dim) for _ in range(count)])

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        chosen = share.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (here := chosen == index).any():
                out[here] = expert(x[here]) * share[here][:, index : index + 1]
        return x + out


class Mixture(nn.Module):
    """A mixture of experts: an expert without a token is not called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Experts() for _ in range(2)])
        self.head = nn.Linear(16, 40)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Reader(nn.Module):
    """Reads its head's weight without calling the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 40)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.score(x)

    def score(self, x):
        return nn.functional.linear(x, self.head.weight, self.head.bias)


class Shared(nn.Module):
    """The same block three times, and a projection that two other blocks share."""

    class User(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.own = Block()
            self.shared = shared

        def forward(self, x):
            return self.own(self.shared(x))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        block, projection = Block(), nn.Linear(16, 16)
        self.again = nn.ModuleList([block] * 3)
        self.users = nn.ModuleList([self.User(projection) for _ in range(3)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in [*self.again, *self.users]:
            x = layer(x)
        return x


class Branches(nn.Module):
    """Uses one branch or the other by the sign of its input."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.left, self.right, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.base(x)
        return self.left(x) if x.flatten()[0] < 0 else self.right(x)


def mlp():
    layers = [nn.Linear(8, 32), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 5))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )


def _library(name, **options):
    """A constructor of a transformers model; the import waits until it is called."""

    def construct():
        import transformers

        kind = getattr(transformers, name)
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        return kind(kind.config_class(**ids | options))

    return construct


_TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def build(kind):
    """The model of that kind, and its inputs as a dict (one entry "x" where it takes one tensor)."""
    torch.manual_seed(0)
    tokens = {"x": torch.randint(0, 40, (4, 8))}
    images = {"pixel_values": torch.randn(4, 3, 16, 16)}
    ids = {"input_ids": torch.randint(3, 60, (4, 8))}
    kinds = {
        "language model": (LanguageModel, tokens),
        "tied": (lambda: LanguageModel(tied=True), tokens),
        "one module": (lambda: nn.Linear(8, 3), {"x": torch.randn(4, 8)}),
        "mlp": (mlp, {"x": torch.randn(4, 8)}),
        "cnn": (cnn, {"x": torch.randn(4, 3, 8, 8)}),
        "recurrent": (Recurrent, tokens),
        "translator": (Translator, tokens),
        "mixture": (Mixture, tokens),
        "reader": (Reader, tokens),
        "shared": (Shared, tokens),
        "llama": (_library("LlamaForCausalLM", num_key_value_heads=1, **_TEXT), ids),
        "gpt2": (_library("GPT2LMHeadModel", n_embd=16, n_layer=3, n_head=2, vocab_size=64), ids),
        "bert": (_library("BertForMaskedLM", **_TEXT), ids),
        "t5": (
            _library(
                "T5ForConditionalGeneration",
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                vocab_size=64,
                decoder_start_token_id=0,
            ),
            {**ids, "decoder_input_ids": ids["input_ids"]},
        ),
        "vit": (_library("ViTForImageClassification", image_size=16, patch_size=4, **_TEXT), images),
        "mixtral": (_library("MixtralForCausalLM", num_key_value_heads=1, num_local_experts=4, **_TEXT), ids),
        "mamba": (
            _library("MambaForCausalLM", hidden_size=16, num_hidden_layers=3, vocab_size=64, state_size=4),
            ids,
        ),
        "swin": (
            _library(
                "SwinForImageClassification",
                embed_dim=8,
                depths=[2, 2],
                num_heads=[2, 2],
                image_size=16,
                patch_size=2,
                window_size=4,
            ),
            images,
        ),
        "resnet": (
            _library(
                "ResNetForImageClassification",
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[2, 2],
                layer_type="basic",
            ),
            images,
        ),
    }
    make, inputs = kinds[kind]
    torch.manual_seed(1)
    return make().eval(), inputs


def run(model, inputs, start=0, end=None):
    """Mean of squares of the output for rows start to end: a loss that is a mean over rows."""
    rows = {name: value[start:end] for name, value in inputs.items()}
    with warnings.catch_warnings():
        # FSDP2 warns of every unit that ends in a Linear with a bias on 3-D input.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        output = model(rows["x"]) if "x" in rows else model(**rows)
    output = getattr(output, "logits", output)
    return output.square().mean()


PLAIN = (
    "language model",
    "tied",
    "one module",
    "mlp",
    "cnn",
    "recurrent",
    "translator",
    "mixture",
    "reader",
    "shared",
)
LIBRARY = ("llama", "gpt2", "bert", "t5", "vit", "mixtral", "mamba", "swin", "resnet")
