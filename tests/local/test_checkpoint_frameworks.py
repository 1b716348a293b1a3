# SPDX-License-Identifier: BSD-3-Clause
"""Trainings with torch and its frameworks whose ranks are killed end with the weights of an undisturbed training."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from tests.local.hosts import Hosts, torchrun

_BEGIN = """
    import hashlib, os, shutil, signal, sys
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch import nn
    import torchx_monarch as tm

    out, kills = Path(sys.argv[1]), sys.argv[2:]
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)

    def may_die(step):
        with open(out / f"steps_{rank}", "a") as file:
            file.write(f"{step}\\n")
        if f"{attempt}:{rank}:{step}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(tensors):
        digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
        (out / f"end_{rank}").write_text(digest)
"""

_LOOP = """
    for step in range(start, 8):
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        may_die(step)
        save(step)
"""

_PROGRAMS = {
    "ddp": """
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
        optimizer, start = torch.optim.AdamW(model.parameters(), lr=1e-2), 0
        if folder := tm.last_checkpoint():
            state = torch.load(folder / f"rank_{rank}.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"] + 1

        def save(step):
            with tm.checkpoint(step) as folder:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / f"rank_{rank}.pt")
        LOOP
        end(model.parameters())
    """,
    "fsdp2 and dcp": """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer, start = torch.optim.AdamW(model.parameters(), lr=1e-2), 0

        def state():
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}

        if folder := tm.last_checkpoint():
            found = state()
            dcp.load(found, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            start = int(folder.name.removeprefix("step_")) + 1

        def save(step):
            with tm.checkpoint(step) as folder:
                dcp.save(state(), checkpoint_id=folder)
        LOOP
        end([parameter.full_tensor() for parameter in model.parameters()])
    """,
    "lightning": """
        import lightning
        from torch.utils.data import DataLoader, TensorDataset

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
            def training_step(self, batch):
                return (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        class InMemory(lightning.Callback):
            def on_train_epoch_end(self, trainer, *_):  # Lightning does not resume within an epoch
                may_die(trainer.global_step)
                with tm.checkpoint(trainer.global_step) as folder:
                    trainer.save_checkpoint(folder / "lightning.ckpt")

        data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
        more = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        devices, nodes = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
        sizes = {"accelerator": "cpu", "strategy": "ddp", "devices": devices, "num_nodes": nodes}
        trainer = lightning.Trainer(callbacks=[InMemory()], max_steps=8, max_epochs=-1, **sizes, **more)
        model, last = Model(), tm.last_checkpoint()
        trainer.fit(model, DataLoader(data, 16), ckpt_path=last and str(last / "lightning.ckpt"))
        end(model.parameters())
    """,
    "transformers": """
        import transformers

        class InMemory(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                may_die(state.global_step)
            def on_save(self, args, state, control, **_):
                saved, own = Path(args.output_dir, f"checkpoint-{state.global_step}"), f"rng_state_{rank}.pth"
                with tm.checkpoint(state.global_step) as folder:
                    for path in saved.iterdir():
                        if path.name == own or rank == 0 and not path.name.startswith("rng_state_"):
                            shutil.copy(path, folder)

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 512
            def __getitem__(self, index):
                return {"input_ids": torch.tensor([index % 64] * 8), "labels": torch.tensor([index % 64] * 8)}

        config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        settings = transformers.TrainingArguments(
            output_dir=str(out / "saved"), max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to="none",
            save_strategy="steps", save_steps=1, save_total_limit=1, disable_tqdm=True,
        )
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model, settings, train_dataset=Data(), callbacks=[InMemory()])
        last = tm.last_checkpoint()
        trainer.train(resume_from_checkpoint=last and str(last))
        end(model.parameters())
    """,
}


def _train(folder: Path, name: str, hosts: int, kills: list[str]) -> tuple[set[str], int]:
    """Return the digests of the weights of both ranks, and how many steps of rank 0 were done again.

    Of more ranks, DDP adds gradients in another order in the first step after a restart.
    """
    (out := folder / f"out{len(kills)}").mkdir()
    body = textwrap.dedent(_PROGRAMS[name]).replace("LOOP\n", textwrap.dedent(_LOOP))
    (program := folder / "program.py").write_text(textwrap.dedent(_BEGIN) + body)
    command = torchrun(str(program), str(out), *kills, nproc=2 // hosts, nnodes=hosts, restarts=len(kills))
    running = Hosts(folder, command, hosts).start()
    assert running.wait() == [0] * hosts, running.err() + running.out()
    steps = (out / "steps_0").read_text().split()
    return {(out / f"end_{rank}").read_text() for rank in (0, 1)}, len(steps) - len({*steps})


@pytest.mark.nightly(reason="two trainings each, with imports of frameworks; test_checkpoints has the rules without")
@pytest.mark.parametrize("name", _PROGRAMS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_weights_are_those_of_an_undisturbed_training(folder: Path, name: str, hosts: int) -> None:
    if importlib.util.find_spec("torch" if name in ("ddp", "fsdp2 and dcp") else name) is None:
        pytest.skip(f"{name} is not installed")
    undisturbed, _ = _train(folder, name, hosts, [])
    disturbed, redone = _train(folder, name, hosts, ["0:1:3", "1:0:6"])
    assert disturbed == undisturbed and len(disturbed) == 1
    assert redone <= 2
