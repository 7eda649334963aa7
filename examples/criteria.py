"""Published test criteria on a model of your own: in your own loop, to order tests, and as the guide of a campaign."""

import torch
from torch import nn

import themis
from themis.criteria import KMNC, NC, apfd, rank

torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
train, clean = torch.rand(500, 1, 8, 8), torch.rand(300, 1, 8, 8)
labels = net(clean).argmax(1)


def activations(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Your own loop: hooks, or whatever gives a layer's values as [inputs, neurons] or [inputs, channels, ...]."""
    layers = {}
    with torch.no_grad():
        for name, module in net.named_children():
            inputs = module(inputs)
            if isinstance(module, nn.ReLU):
                layers[name] = inputs
    return layers


# k-multisection neuron coverage of noisy inputs, a batch at a time; fit sees the training data, a batch at a time too.
kmnc = KMNC(k=100).fit(activations(batch) for batch in train.split(100))
noisy = (clean + 0.3 * torch.randn_like(clean)).clamp(0, 1)
for batch in noisy.split(64):
    raised = kmnc.update(activations(batch))  # which tests raised it, as if each had come alone
    print(f"KMNC {kmnc.score():.1%}, raised by {int(raised.sum())} of {len(batch)} tests")

# Two halves on two machines make a whole.
halves = [kmnc.fresh(), kmnc.fresh()]
for half, batch in zip(halves, noisy.split(150), strict=True):
    half.update(activations(batch))
print("merged halves are the whole:", halves[0].merge(halves[1]).score() == kmnc.score())

# Which tests to label first? Those that add most coverage; APFD says how early that brings the faults (0.5 is chance).
is_fault = net(noisy).argmax(1) != labels
for criterion in (NC(0.5), kmnc):
    order = rank(criterion, activations(noisy), by="cam")
    print(f"{criterion.name}: APFD {apfd(order, is_fault):.3f}")

# The same criterion as the guide of a campaign: a fuzzer that mutates what raises it.
run = themis.run(net, (clean, labels), "gaussian", magnitude=0.3, criterion="kmnc(k=100)", train=train, max_tests=2_000)
found = run.criterion()
print(f"{found['name']} {found['score']:.1%}, {run.rounds[-1].distinct_faults} distinct faults")
print(run.stop)
