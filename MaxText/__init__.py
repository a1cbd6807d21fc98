# SPDX-License-Identifier: Apache-2.0

import os

# Paths on gs:// through gcsfs even where TensorFlow is installed, whose import takes 8 s and 800 MB. etils reads this.
os.environ.setdefault("EPATH_USE_TF", "false")
