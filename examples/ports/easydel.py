"""EasyDeL's example, ported: a sharded causal language model on texts of varying length, saved for `from_pretrained`.

python examples/ports/easydel.py                                     in this process
torchrun --nproc-per-node 2 examples/ports/easydel.py                on two ranks, each with half of the parameters
headway fit examples/ports/easydel.py scaling.workers=2              the same on two Ray workers

Running it again resumes the run. docs/coming-from/small-trainers.md maps the names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from headway.orchestrator import Experiment
from headway.trainer import CheckpointConfig, ParallelConfig, Trainer, TrainerConfig, optimizers, schedules

PAD, BEGIN, END = 10, 11, 12
IGNORED = -100  # the label without a loss, by Hugging Face's convention


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(TrainerConfig):
    learning_rate: float = 3e-3
    weight_decay: float = 0.01


class FineTune(Trainer[FineTuneConfig]):
    """Learns to continue counting: any prefix of "4 5 6 7" determines the rest."""

    def configure_models(self):
        # Random weights. For pretrained: `with torch.device("cpu"): AutoModelForCausalLM.from_pretrained(name)`.
        self.model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=13,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=32,
                pad_token_id=PAD,
                bos_token_id=BEGIN,
                eos_token_id=END,
            )
        )

    def init_weights(self):
        self.model.initialize_weights()

    def configure_optimizers(self):
        config = self.config
        self.optimizer = optimizers.adamw(self.model, config.learning_rate, config.weight_decay)
        self.scheduler = schedules.linear(self.optimizer, total_steps=self.total_steps, warmup_steps=10)

    def configure_dataloaders(self):
        texts = counting(600, seed=self.config.seed)
        return (
            DataLoader(
                texts[100:], shuffle=True, collate_fn=collate
            ),  # Headway cuts batches of config.global_batch_size
            DataLoader(texts[:100], batch_size=50, collate_fn=collate),
        )

    def training_step(self, batch, batch_idx):
        # The model shifts the labels by one, and returns the mean loss over labels that are not ignored.
        loss = self.model(**batch, use_cache=False).loss
        return {"loss": loss, "perplexity": loss.exp()}

    def loss_weight(self, batch):
        """Return the number of labels, so that each token has the same weight although texts differ in length."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def num_tokens(self, batch):
        return batch["attention_mask"].sum()

    def on_step_end(self):
        if self.global_step % 40 == 0:
            self.print(f"step {self.global_step}: next learning rate {self.scheduler.get_last_lr()[0]:.2e}")

    def on_fit_end(self, error):
        if error is None and self.run_dir is not None:
            self.save_pretrained(f"{self.run_dir}/pretrained")


def counting(number, *, seed):
    """Return texts of 5 to 20 tokens: digits that count up from a random start, between BEGIN and END."""
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(low, high, (), generator=random).item()

    starts_and_lengths = [(draw(0, 10), draw(3, 19)) for _ in range(number)]
    return [[BEGIN, *((start + i) % 10 for i in range(length)), END] for start, length in starts_and_lengths]


def collate(texts):
    """Pad the texts of a batch to one length; padding gets no attention and no loss."""
    longest = max(map(len, texts))
    tokens_BT = torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in texts])
    is_text_BT = tokens_BT != PAD
    return {
        "input_ids": tokens_BT,
        "attention_mask": is_text_BT.long(),
        "labels": tokens_BT.masked_fill(~is_text_BT, IGNORED),
    }


experiment = Experiment(
    name="easydel",
    trainer=FineTune,
    config=FineTuneConfig(
        max_epochs=5,
        global_batch_size=32,  # their total_batch_size
        micro_batch_size=16,  # their per_device_train_batch_size; accumulation follows
        max_grad_norm=1.0,
        log_every="10 steps",
        evaluate_every="20 steps",
        checkpoint=CheckpointConfig(every="40 steps", keep_last=2),
        parallel=ParallelConfig(strategy="fsdp", activation_checkpointing="full"),
    ),
)

if __name__ == "__main__":
    trainer = FineTune(experiment.config, run_dir="runs/easydel-alone")
    result = trainer.fit()
    if trainer.world.is_main:
        model = AutoModelForCausalLM.from_pretrained("runs/easydel-alone/pretrained")
        prompt = torch.tensor([[BEGIN, 4, 5, 6]])
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        print(f"{result.status}: loss {result.metrics['validation/loss']:.2f}; after 4 5 6: {written[0, 4:].tolist()}")
