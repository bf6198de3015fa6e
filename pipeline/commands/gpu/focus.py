"""GPU use as CSV with the columns of FOCUS 1.2 (focus.finops.org), for tools that read bills.

The pool knows no prices: all costs are 0, and the quantities carry the use. Quantities are GPU-hours by the
share of the device. Columns of ours begin with `x_`, as FOCUS wants.
"""

import csv
import re
import sys
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from pipeline.settings import Settings

# A cell that a spreadsheet would take for a formula: a program may name any tenant.
_FORMULA: Final = re.compile(r"^[=+\-@\t\r]")
_COSTS: Final = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")


def csv_cell(text: str) -> str:
    """The text, harmless in a spreadsheet."""
    return _FORMULA.sub(r"'\g<0>", text)


def print_focus(settings: Settings, since: datetime | None, until: datetime | None) -> None:
    """One line for each day, tenant, model and kind. Raises StoreUnavailable, BadPayload."""
    from pipeline.sinks.choose import usage_of  # a base install has no Polars, and asks an API
    from pipeline.sinks.usage import usage_charges

    charges = usage_charges(usage_of(settings), since, until)
    writer = csv.DictWriter(sys.stdout, list(focus_charge({})), lineterminator="\n")
    writer.writeheader()
    for row in charges.iter_rows(named=True):
        writer.writerow(focus_charge(row))


def focus_charge(row: dict[str, Any]) -> dict[str, str]:
    """A row of `usage_charges` under the names of FOCUS; an empty one gives the columns."""
    day = date.fromisoformat(row.get("day", "2026-01-01"))
    month = day.replace(day=1)
    hours = f"{row.get('gpu_hours', 0.0):.6f}"
    tenant, model = csv_cell(row.get("tenant", "")), csv_cell(row.get("model", ""))
    return {
        **dict.fromkeys(_COSTS, "0"),
        "BillingAccountId": tenant,
        "BillingAccountName": tenant,
        "BillingCurrency": "USD",
        "BillingPeriodStart": _at(month),
        "BillingPeriodEnd": _at((month + timedelta(days=31)).replace(day=1)),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"leased time of {model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _at(day),
        "ChargePeriodEnd": _at(day + timedelta(days=1)),
        "ConsumedQuantity": hours,
        "ConsumedUnit": "GPU-Hours",
        "InvoiceIssuerName": "logweir",
        "PricingQuantity": hours,
        "PricingUnit": "GPU-Hours",
        "ProviderName": "logweir",
        "PublisherName": "logweir",
        "ServiceCategory": "Compute",
        "ServiceName": "GPU pool",
        "x_DeviceModel": model,
        "x_Kind": row.get("kind", ""),
        "x_GiBHours": f"{row.get('gib_hours', 0.0):.6f}",
    }


def _at(day: date) -> str:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
