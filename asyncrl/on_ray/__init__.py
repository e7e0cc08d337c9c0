"""A run's processes as Ray's actors: what is asked for, where it is placed, and how the trio program hears of them.

    bundles     what a configuration asks for, and whether a cluster has it; knows no Ray
    cluster     the connection to Ray and the placement group
    calls       what Ray's calls give, awaited in trio
    actor       what runs on a node: one actor, which keeps one process
    hosting     the program between that actor and its process, which cleans up when the actor is killed
    roles       the orchestrator's side of one actor
    parts       engines, learner, sandboxes and environment of a run, made of roles

Ray places, watches and restarts the actors and carries their logs. A process is the one that the orchestrator would
start at home, under the same keeper.
"""
