"""Twenty tools as JSON schemas of a call, and two requests for each."""

from __future__ import annotations

from typing import Any, NamedTuple

INSTRUCTION = "Answer with one JSON object that calls the tool {}. {}"


class Tool(NamedTuple):
    """A tool: its arguments as JSON schemas by name, and what users ask of it."""

    name: str
    arguments: dict[str, Any]
    requests: tuple[str, str]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of a call of this tool."""
        return _object({"name": {"const": self.name}, "arguments": _object(self.arguments)})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def _choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


_TEXT = {"type": "string", "maxLength": 40}
_FLAG = {"type": "boolean"}
_DATE = {"type": "string", "format": "date"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
_SHARE = {"type": "number", "minimum": 0, "maximum": 100}

TOOLS = (
    Tool("get_weather", {"city": _TEXT, "unit": _choice("celsius", "fahrenheit")},
         ("How warm is it in Lisbon?", "Is it raining in Oslo today?")),
    Tool("send_message", {"recipient": _TEXT, "message": _TEXT, "urgent": _FLAG},
         ("Tell Anna that I am late.", "Ask Tom whether he has the keys; it is urgent.")),
    Tool("create_event", {"title": _TEXT, "date": _DATE, "duration_minutes": _COUNT},
         ("Put lunch with Maria on 2025-03-14 for an hour.", "Dentist on 2025-06-02, 30 minutes.")),
    Tool("search_flights", {"origin": _TEXT, "destination": _TEXT, "departure_date": _DATE,
                            "cabin_class": _choice("economy", "business", "first")},
         ("Find a flight from Rome to Paris on 2025-05-01.", "Business from Tokyo to Seoul.")),
    Tool("convert_currency", {"amount": _COUNT, "source_currency": _choice("USD", "EUR", "JPY"),
                              "target_currency": _choice("USD", "EUR", "JPY")},
         ("What are 250 dollars in euros?", "Change 90 euros to yen.")),
    Tool("set_alarm", {"hour": {"type": "integer", "minimum": 0, "maximum": 23},
                       "minute": {"type": "integer", "minimum": 0, "maximum": 59},
                       "repeat_daily": _FLAG},
         ("Wake me at half past six every day.", "Alarm at 21:15, only tonight.")),
    Tool("translate_text", {"text": _TEXT, "source_language": _choice("en", "de", "fr", "es"),
                            "target_language": _choice("en", "de", "fr", "es")},
         ("Say good morning in German.", "Translate 'the cat sleeps' to French.")),
    Tool("book_table", {"restaurant_name": _TEXT, "number_of_guests": _COUNT,
                        "seating_preference": _choice("indoor", "outdoor", "any")},
         ("A table for four at Luigi's, outside.", "Book the Golden Duck for two people.")),
    Tool("query_database", {"table_name": _choice("customers", "orders", "products"),
                            "columns": _list(_TEXT), "maximum_rows": _COUNT},
         ("Show name and city of 20 customers.", "List the prices of all products.")),
    Tool("create_user_account", {"username": _TEXT, "email_address": _TEXT,
                                 "role": _choice("administrator", "editor", "viewer")},
         ("Make an account for Ben, who edits pages.", "Add jane@example.org as a viewer.")),
    Tool("play_music", {"artist": _TEXT, "song_title": _TEXT, "shuffle": _FLAG},
         ("Play Yesterday by the Beatles.", "Play something by Miles Davis in any order.")),
    Tool("calculate_loan", {"principal_amount": _COUNT, "annual_interest_rate": _SHARE,
                            "number_of_years": _COUNT},
         ("A loan of 900 at 4 percent over 5 years.", "Borrow 500 for two years at 3.5 percent.")),
    Tool("track_package", {"tracking_number": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{8}$"},
                           "carrier": _choice("ups", "dhl", "fedex")},
         ("Where is DHL package AB12345678?", "Track ZX00112233 with UPS.")),
    Tool("set_thermostat", {"room": _choice("kitchen", "bedroom", "living_room"),
                            "target_temperature": _SHARE, "mode": _choice("heat", "cool", "off")},
         ("Heat the bedroom to 19 degrees.", "Cool the kitchen down to 22.")),
    Tool("create_ticket", {"summary": _TEXT, "priority": _choice("low", "medium", "high"),
                           "assigned_team": _choice("support", "engineering", "billing")},
         ("The login page is down, tell the engineers.", "A customer was charged twice.")),
    Tool("find_recipe", {"main_ingredient": _TEXT, "maximum_minutes": _COUNT,
                         "dietary_restrictions": _list(_choice("vegan", "gluten_free", "none"))},
         ("A vegan dish with lentils in 30 minutes.", "What can I cook with salmon?")),
    Tool("schedule_job", {"job_name": _TEXT, "interval": _choice("hourly", "daily", "weekly"),
                          "notify_on_failure": _FLAG},
         ("Run the backup every night and tell me if it fails.", "Clean the cache each hour.")),
    Tool("get_stock_price", {"ticker_symbol": {"type": "string", "pattern": "^[A-Z]{1,5}$"},
                             "include_history": _FLAG},
         ("How is Apple's stock doing?", "Price of MSFT with its history.")),
    Tool("navigate_route", {"start_location": _TEXT, "end_location": _TEXT,
                            "transport_mode": _choice("car", "bicycle", "train", "walking")},
         ("How do I cycle from Delft to Leiden?", "Drive me from Boston to Salem.")),
    Tool("report_position", {"coordinates": _object({"latitude": _SHARE, "longitude": _SHARE}),
                             "accuracy_in_meters": _COUNT},
         ("I am at 48.2 north, 16.4 east.", "Report 52.5, 13.4 within 10 meters.")),
)  # fmt: skip
