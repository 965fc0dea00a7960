"""Searching settings: many runs of `alignment fit` with different values, by Optuna or as a population.

    space        what may be changed, in which range
    process      one run of `alignment fit` in a process of its own, and the metrics it logs
    search       Optuna: TPE, several objectives, pruning, a study in sqlite that goes on where it stopped
    population   population-based training: values move while the runs train
    outcome      tables, pictures, YAML of the best, the parent run in MLflow
"""
