"""Plan, measure each case, merge: from cases to ``Results``; maps, ``check`` and ``apply`` go the same way."""
