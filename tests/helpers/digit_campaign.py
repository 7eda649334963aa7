"""A short campaign on the trained LeNet-5 and the digits it has not seen."""

import themis
from themis import Target


def campaign(trained, *, perturbation="gaussian", **options):
    model, digits = trained
    options = {"magnitude": 0.3, "max_tests": 2560, "max_seeds": 300, **options}
    return themis.run(Target(model), digits, perturbation, **options)
