"""Input plans: what every session sends and how long it waits, content-addressed and the same for all conditions.

Nothing here reads a clock or opens a socket.
"""

from harness.plan.blocks import BlockKeys, token_block_keys
from harness.plan.build import check_fits, derive_seed, describe, draw_plan, draw_requests, is_waited, wait_cap_ns
from harness.plan.event_queue import STEADY_START, UserTimelines, begun_in_the_middle, users_of, whole_sessions
from harness.plan.files import read_plan, save_plan, write_plan
from harness.plan.model import Followers, Plan, RequestPlan, SessionPlan
from harness.plan.tokens import PromptIds, TokenStreams
from harness.plan.waits import WaitDistribution, load_waits
from harness.plan.words import TextSizes
