// Closes reasoning that becomes long.
//
// `steersman policy build` writes bindings/guest.h from wit/; a hook is called if wit/world.wit exports it. A hook owns
// its argument and frees it; the host frees what a hook returns, which must be allocated. One instance serves one
// request, so statics are its state. Functions of stdio import WASI, which no policy may.

#include <stdlib.h>
#include <string.h>

#include "guest.h"

// Limit on reasoning tokens.
#define REASONING_TOKENS 1024

void exports_steersman_policy_on_request_on_request(exports_steersman_policy_on_request_request_view_t *request, exports_steersman_policy_on_request_plan_t *plan) {
  // All zero: nothing is decided.
  memset(plan, 0, sizeof *plan);
  plan->reasoning = request->reasoning;
  plan->every = 16;
  exports_steersman_policy_on_request_request_view_free(request);
}

void exports_steersman_policy_on_step_on_step(exports_steersman_policy_on_step_step_t *step, exports_steersman_policy_on_step_list_action_t *actions) {
  actions->len = 0;
  actions->ptr = malloc(sizeof *actions->ptr);
  if (!actions->ptr) abort();
  if (step->phase == STEERSMAN_POLICY_TYPES_PHASE_REASONING && step->reasoning_tokens >= REASONING_TOKENS) {
    steersman_policy_types_action_t *action = &actions->ptr[actions->len++];
    action->tag = STEERSMAN_POLICY_TYPES_ACTION_CLOSE_REASONING;
    guest_string_dup(&action->val.close_reasoning, "In short: ");
  }
  exports_steersman_policy_on_step_step_free(step);
}
