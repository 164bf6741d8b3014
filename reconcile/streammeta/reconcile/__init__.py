"""Reconciliation of a bucket with the metadata: unknown objects and missing ones.

`plan`, `apply`, `open_plan` and `register` are for notebooks and jobs, see `notebook`.
"""

from streammeta.reconcile.notebook import Applied, Plan, apply, open_plan, plan, register

__all__ = ["Applied", "Plan", "apply", "open_plan", "plan", "register"]
