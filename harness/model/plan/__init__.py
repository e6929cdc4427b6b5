"""Input plans: what every session sends and how long it waits, content-addressed and the same for all conditions.

Nothing here reads a clock or opens a socket.
"""

from harness.model.plan.blocks import BlockKeys, token_block_keys
from harness.model.plan.build import check_fits, derive_seed, describe, draw_plan, draw_requests, is_waited, wait_cap_ns
from harness.model.plan.event_queue import STEADY_START, UserTimelines, begun_in_the_middle, users_of, whole_sessions
from harness.model.plan.files import read_plan, save_plan, write_plan
from harness.model.plan.model import Followers, Plan, RequestPlan, SessionPlan
from harness.model.plan.tokens import PromptIds, TokenStreams
from harness.model.plan.waits import WaitDistribution, load_waits
from harness.model.plan.words import TextSizes
