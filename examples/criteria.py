"""Use published test criteria on your own model: in your own loop, to order tests, and to guide a campaign."""

import torch
from torch import nn

import themis
from themis_lab.criteria import KMNC, NC, apfd, rank

torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
train, clean = torch.rand(500, 1, 8, 8), torch.rand(300, 1, 8, 8)
labels = net(clean).argmax(1)


def activations(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the activations of each layer as [inputs, neurons] or [inputs, channels, ...], here by running the net."""
    layers = {}
    with torch.no_grad():
        for name, module in net.named_children():
            inputs = module(inputs)
            if isinstance(module, nn.ReLU):
                layers[name] = inputs
    return layers


# k-multisection neuron coverage of noisy inputs, one batch at a time; fit also reads the training data in batches.
kmnc = KMNC(k=100).fit(activations(batch) for batch in train.split(100))
noisy = (clean + 0.3 * torch.randn_like(clean)).clamp(0, 1)
for batch in noisy.split(64):
    raised = kmnc.update(activations(batch))  # which tests raised the score, as if passed one by one
    print(f"KMNC {kmnc.score():.1%}, raised by {int(raised.sum())} of {len(batch)} tests")

# Criteria that were updated on two machines can be merged.
halves = [kmnc.fresh(), kmnc.fresh()]
for half, batch in zip(halves, noisy.split(150), strict=True):
    half.update(activations(batch))
print("the merged halves equal the whole:", halves[0].merge(halves[1]).score() == kmnc.score())

# Which tests should be labelled first? Those that add most coverage; APFD tells how early this finds the faults (0.5
# is chance).
is_fault = net(noisy).argmax(1) != labels
for criterion in (NC(0.5), kmnc):
    order = rank(criterion, activations(noisy), by="cam")
    print(f"{criterion.name}: APFD {apfd(order, is_fault):.3f}")

# The same criterion guides a campaign: a fuzzer mutates the tests that raise it.
run = themis.run(net, (clean, labels), "gaussian", magnitude=0.3, criterion="kmnc(k=100)", train=train, max_tests=2_000)
result = run.criterion()
print(f"{result['name']} {result['score']:.1%}, {run.rounds[-1].distinct_faults} distinct faults")
print(run.stop)
