"""Reconciliation of a bucket with the map: objects stored but unknown, and known but missing.

`plan`, `apply`, `open_plan` and `register` are for notebooks and jobs, see `notebook`.
"""

from streammeta.reconcile.notebook import Applied, Plan, apply, open_plan, plan, register

__all__ = ["Applied", "Plan", "apply", "open_plan", "plan", "register"]
