"""Pipeline parallelism: a schedule is a program of actions, made and proven before it runs."""
