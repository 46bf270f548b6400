"""Online INT8 ConvRot: config -> survey -> plan -> convert -> rebuild -> patcher, and the report."""
