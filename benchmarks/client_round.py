"""What a step of a client's round costs beside a plain PyTorch loop, by model, precision and compilation.

    python benchmarks/client_round.py [--device auto] [--models vit_tiny ...] [--steps 50] [--repeats 5]

The plain loop does the same crops, normalisation and loss on batches drawn on the device, with torch.optim.AdamW
(fused), and nothing else. The client does a whole round of FedACT: model, Delta_G and v_bar in, steps, delta and v out,
as NumPy arrays. Both are divided by the number of steps. Random images in CIFAR-10's format, batches of 50. Prints one
Markdown table: medians over repeats, the two sides in turns, after one warm-up each (with compilation, the warm-up
compiles). Memory is the peak of both.
"""

import argparse
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch

from clients.client import FedClient, exchanged_state, trainable_parameters
from clients.device import prepare_device
from clients.optimizers import StabilityWarning
from fedact_flwr.settings import Settings, parse, read_defaults
from strategies import wire
from tasks import TASKS
from tasks.vision import ImageTask

EXAMPLES = 500  # of a client, as with 50,000 images and 100 clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--models", nargs="+", default=["resnet18", "vit_tiny", "swin_lite"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--compile", nargs="+", type=lambda text: text == "true", default=[False, True])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    warnings.simplefilter("ignore", StabilityWarning)  # the defaults stand on the edge
    device = prepare_device(arguments.device, arguments.threads)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {device.type}"
    print(f"{machine}, {arguments.threads} thread(s), PyTorch {torch.__version__}, {arguments.steps} steps a round\n")
    print("| model | precision | compile | plain AdamW, ms a step | FedACT client | ratio | peak memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for precision in arguments.precisions:
            for compiled in arguments.compile:
                own = {"model": model, "precision": precision, "compile": compiled, "local_steps": arguments.steps}
                own |= {"task": "cifar10", "batch_size": 50, "device": device.type, "threads": arguments.threads}
                settings = parse(read_defaults() | own | {"diagnostics": False})
                plain, client, memory = measure(settings, device, arguments.repeats)
                ratio, mib = client / plain, f"{memory / 2**20:.0f}" if memory else ""
                print(f"| {model} | {precision} | {compiled} | {plain:.2f} | {client:.2f} | {ratio:.2f} | {mib} |")


def measure(settings: Settings, device: torch.device, repeats: int) -> tuple[float, float, int]:
    """Milliseconds a step of the plain loop and of the client, and the peak memory of both on a GPU (else 0)."""
    task = TASKS[settings.task].configured(settings)
    assert isinstance(task, ImageTask)
    examples = {
        "image": torch.randint(0, 256, (EXAMPLES, *task.spec.shape), dtype=torch.uint8, device=device),
        "label": torch.randint(0, task.spec.classes, (EXAMPLES,), device=device),
    }
    model = task.make_model(0).to(device)
    trained = torch.compile(model) if settings.compile else model
    adamw = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=True)

    def plain() -> None:
        model.train()
        for _ in range(settings.local_steps):
            chosen = torch.randint(0, EXAMPLES, (settings.batch_size,), device=device)
            adamw.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
                loss = task.loss(trained, {name: tensor[chosen] for name, tensor in examples.items()})
            loss.backward()
            adamw.step()

    client = FedClient(task, model, examples, examples, settings, trained)
    state = {name: tensor.detach().cpu().numpy().copy() for name, tensor in exchanged_state(model).items()}
    zeros = {name: torch.zeros_like(p, device="cpu").numpy() for name, p in trainable_parameters(model)}
    message = {wire.MODEL: state, wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}
    with tempfile.TemporaryDirectory() as folder:
        config = {wire.PARTITION: 0, wire.SEED: 1, wire.LR: settings.lr, wire.ROUND: 1, wire.STATE_FOLDER: folder}
        config |= {wire.STEPS_DONE: 0.0, wire.FOLDED: 0}

        def federated() -> None:
            client.fit(message, config)

        plain()
        federated()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [(seconds(plain, device), seconds(federated, device)) for _ in range(repeats)]
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    plain_ms, client_ms = (1000 * statistics.median(side) / settings.local_steps for side in zip(*times, strict=True))
    return plain_ms, client_ms, memory


def seconds(work: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
