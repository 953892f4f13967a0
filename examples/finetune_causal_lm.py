"""Fine-tune a Hugging Face causal language model on text, and save it for `from_pretrained`.

python examples/finetune_causal_lm.py                              in this process, data from Hugging Face `datasets`
headway fit examples/finetune_causal_lm.py scaling.workers=2       on two Ray workers, FSDP

With pretrained weights (a name or folder), and Headway's stream over Parquet instead of `datasets`:

python examples/finetune_causal_lm.py --prepare data/finetune --pretrained NAME
headway fit examples/finetune_causal_lm.py config.parquet=$PWD/data/finetune config.pretrained=NAME
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from headway.datasets.prepare import prepare_text, split_files
from headway.datasets.stream import ParquetStream
from headway.datasets.tokenizers import ByteTokenizer
from headway.orchestrator import Experiment
from headway.trainer import ParallelConfig, Trainer, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainerConfig):
    pretrained: str | None = None
    parquet: str | None = None
    context: int = 64
    learning_rate: float = 3e-3

    @property
    def tokenizer(self):
        if self.pretrained is None:
            return ByteTokenizer()
        tokenizer = AutoTokenizer.from_pretrained(self.pretrained)
        return lambda text: tokenizer(text)["input_ids"]


class Finetune(Trainer[FinetuneConfig]):
    def configure_models(self):
        if self.config.pretrained is None:
            tiny = LlamaConfig(
                vocab_size=ByteTokenizer.vocab_size,
                bos_token_id=ByteTokenizer.bos,
                eos_token_id=ByteTokenizer.eos,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=self.config.context,
                tie_word_embeddings=True,
            )
            self.model = AutoModelForCausalLM.from_config(tiny)
            return
        with torch.device("cpu"):  # not on the meta device, which cannot hold the loaded values
            # Train float32 weights, whatever the saved dtype; config.precision sets the dtype of the forward pass.
            self.model = AutoModelForCausalLM.from_pretrained(self.config.pretrained, dtype=torch.float32).train()

    def init_weights(self):
        # Hugging Face modules have no reset_parameters; this also computes the rotary buffers.
        self.model.initialize_weights()

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)

    def configure_dataloaders(self):
        config = self.config
        if config.parquet is not None:
            return ParquetStream(f"{config.parquet}/train"), ParquetStream(f"{config.parquet}/held-out")
        train, held_out = (rows_of(files, config.tokenizer, config.context) for files in sources())
        return DataLoader(train), DataLoader(held_out)  # Headway cuts batches of config.global_batch_size

    def training_step(self, batch, batch_idx):
        tokens_BT = batch["tokens"].long()
        # The model shifts the labels by one, and returns the mean loss over all predicted tokens.
        return {"loss": self.model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss}

    def num_tokens(self, batch):
        return batch["tokens"].numel()

    def on_fit_end(self, error):
        if error is None and self.run_dir is not None:
            self.save_pretrained(f"{self.run_dir}/pretrained")


def sources():
    """Return the training files and the held-out files."""
    return split_files(Path(sysconfig.get_path("stdlib")) / "email", held_out=0.1)


def rows_of(files, tokenizer, length):
    """Tokenize files into rows of `length` tokens with Hugging Face `datasets`."""

    def tokenize(batch):
        tokens = [token for text in batch["text"] for token in tokenizer(text)]
        return {"tokens": [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]}

    texts = datasets.Dataset.from_dict({"text": [file.read_text() for file in files if file.suffix == ".py"]})
    return texts.map(tokenize, batched=True, remove_columns=["text"]).with_format("torch")


experiment = Experiment(
    name="finetune",
    trainer=Finetune,
    config=FinetuneConfig(
        max_steps=60,
        global_batch_size=32,
        max_grad_norm=1.0,
        log_every="20 steps",
        parallel=ParallelConfig(strategy="fsdp"),  # sharded by the layers that the model declares
    ),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", metavar="FOLDER")
    parser.add_argument("--pretrained", metavar="NAME")
    wanted = parser.parse_args()
    config = replace(experiment.config, pretrained=wanted.pretrained)
    if wanted.prepare:
        for name, files in zip(("train", "held-out"), sources(), strict=True):
            folder = Path(wanted.prepare, name)
            print(prepare_text(files, folder, row_length=config.context, tokenizer=config.tokenizer))
    else:
        result = Finetune(config, run_dir="runs/finetune-alone").fit()
        loaded = AutoModelForCausalLM.from_pretrained("runs/finetune-alone/pretrained")
        loss = result.metrics["validation/loss"]
        print(f"{result.status}: loss {loss:.2f}; saved {loaded.num_parameters():,} parameters")
