# SPDX-License-Identifier: Apache-2.0

import os

# Paths on gs:// through gcsfs even where TensorFlow is installed, whose import takes 8 s and 800 MB. etils reads this.
os.environ.setdefault("EPATH_USE_TF", "false")
# gcsfs lists a folder once and never again: it would neither see what other hosts write nor that a file has grown.
os.environ.setdefault("FSSPEC_GCS", '{"use_listings_cache": false}')
