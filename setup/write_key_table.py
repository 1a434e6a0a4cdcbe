"""Write `adora_vl/config/keys.json` anew, for a key that was added or for other versions of TRL and Transformers.

python setup/write_key_table.py
"""

from __future__ import annotations

import json

from adora_vl.config.first_look import TABLE, key_table

if __name__ == "__main__":
    TABLE.write_text(json.dumps(key_table(), separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8")
