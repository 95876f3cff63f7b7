"""The chip's power and clocks beside a measurement, as nvidia-smi sees them."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import threading
import time

QUERY = "power.draw.instant,clocks.sm,clocks_event_reasons.active"


class Watch:
    """Asks for the first visible GPU's every 20 ms while a block runs; sees nothing where there is no nvidia-smi."""

    def __enter__(self) -> Watch:
        self.seen: list[tuple[float, float, int, str]] = []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
        command = ["nvidia-smi", "-i", visible, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "20"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
            return self
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        time.sleep(0.3)  # until it answers
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                watts, sm, reasons = (field.strip() for field in line.split(","))
                self.seen.append((time.perf_counter(), float(watts), int(sm), reasons))
            except ValueError:  # not available, or an error message
                continue

    def __exit__(self, *_) -> None:
        if self.process is not None:
            self.process.terminate()
            self.reader.join(2)

    def summary(self, start: float = -math.inf, stop: float = math.inf) -> dict:
        """Means and extremes of what was seen between two moments of `time.perf_counter`; empty if that is nothing."""
        rows = [row[1:] for row in list(self.seen) if start <= row[0] <= stop]
        if not rows:
            return {}
        watts, sm, reasons = zip(*rows, strict=True)
        return {
            "watts": round(statistics.mean(watts), 1),
            "highest_watts": max(watts),
            "sm_mhz": round(statistics.mean(sm)),
            "lowest_sm_mhz": min(sm),
            "highest_sm_mhz": max(sm),
            "reasons": sorted(set(reasons)),
            "samples": len(rows),
        }
