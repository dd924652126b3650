"""From cases to ``Results``: plan, measure each case, merge. Also voxel maps, ``check`` and ``apply``."""
