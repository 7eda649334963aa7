"""Show a campaign in TensorBoard: python track_tensorboard.py, then tensorboard --logdir events.

Needs `pip install "themis-dl[tensorboard]"`. The digits need `pip install "themis-dl[demo]"`.
"""

import torch

import themis
from themis_integrations import TensorBoard
from themis_integrations.data.digits import read_digits
from themis_lab.cli.demo import split, trained_lenet5

torch.set_num_threads(1)
train, held_out = split(read_digits())
net = trained_lenet5(train, held_out, print)

run = themis.run(net, held_out, "gaussian", magnitude=0.3, max_tests=2560, callbacks=[TensorBoard("events")])

print(run.stop)
print(f"{len(run.faults):,} faults; look at them: tensorboard --logdir events")
