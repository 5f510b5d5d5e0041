// A policy that limits reasoning, ends an answer at a phrase, bans a token, and repairs a tool call whose
// result is known. Parameters: `budget` (reasoning tokens, default 100), `phrase`, `ban` (a token).
//
// `steersman policy build` writes bindings/guest.h from wit/. A hook owns its argument and frees it; the host frees what
// a hook returns, which must be allocated. One instance serves one request, so statics are its state. Functions of
// stdio import WASI, which no policy may.

#include <stdlib.h>
#include <string.h>

#include "guest.h"

static uint32_t budget = 100;
static guest_option_u32_t banned;
static char *phrase = "";
// The end of the answer so far, in which the phrase may begin.
static char *tail;
static size_t tail_len;

static void *allocate(size_t bytes) {
  void *memory = malloc(bytes ? bytes : 1);
  if (!memory) abort();
  return memory;
}

static bool equal(const guest_string_t *a, const guest_string_t *b) {
  return a->len == b->len && memcmp(a->ptr, b->ptr, a->len) == 0;
}

// Texts joined; the end is marked by a NULL.
static char *join(const char *const *parts) {
  size_t len = 0;
  for (size_t i = 0; parts[i]; i++) len += strlen(parts[i]);
  char *text = allocate(len + 1);
  text[0] = 0;
  for (size_t i = 0; parts[i]; i++) strcat(text, parts[i]);
  return text;
}

// The text of a parameter, or NULL.
static char *param(const steersman_policy_types_request_view_t *request, const char *name) {
  for (size_t i = 0; i < request->params.len; i++) {
    guest_tuple2_string_string_t *param = &request->params.ptr[i];
    if (param->f0.len == strlen(name) && memcmp(param->f0.ptr, name, param->f0.len) == 0) {
      char *text = allocate(param->f1.len + 1);
      memcpy(text, param->f1.ptr, param->f1.len);
      text[param->f1.len] = 0;
      return text;
    }
  }
  return NULL;
}

// A number of up to nine digits; anything else becomes a note.
static bool number(const steersman_policy_types_request_view_t *request, const char *name, uint32_t *value, char **notes) {
  char *text = param(request, name);
  if (!text) return false;
  size_t len = strlen(text);
  if (len > 0 && len <= 9 && strspn(text, "0123456789") == len) {
    *value = (uint32_t)strtoul(text, NULL, 10);
    return true;
  }
  const char *separator = **notes ? "; " : "";
  *notes = join((const char *const[]){*notes, separator, "parameter `", name, "` cannot be `", text, "`", NULL});
  return false;
}

void exports_steersman_policy_on_request_on_request(exports_steersman_policy_on_request_request_view_t *request, exports_steersman_policy_on_request_plan_t *plan) {
  char *notes = "";
  number(request, "budget", &budget, &notes);
  if (request->reasoning_budget.is_some && request->reasoning_budget.val < budget) budget = request->reasoning_budget.val;
  banned.is_some = number(request, "ban", &banned.val, &notes);
  char *text = param(request, "phrase");
  if (text) phrase = text;

  // All zero: nothing is decided.
  memset(plan, 0, sizeof *plan);
  plan->reasoning = request->reasoning;
  plan->reasoning_budget.is_some = true;
  plan->reasoning_budget.val = budget;
  plan->every = 8;
  if (*notes) {
    plan->note.is_some = true;
    guest_string_dup(&plan->note.val, notes);
  }
  exports_steersman_policy_on_request_request_view_free(request);
}

// Appends text of the answer; whether it now contains the phrase. Keeps as much as the phrase could begin in.
static bool says_phrase(const guest_string_t *text) {
  size_t wanted = strlen(phrase), len = tail_len + text->len;
  char *all = allocate(len);
  if (tail_len) memcpy(all, tail, tail_len);
  if (text->len) memcpy(all + tail_len, text->ptr, text->len);
  bool found = false;
  for (size_t at = 0; !found && at + wanted <= len; at++) found = memcmp(all + at, phrase, wanted) == 0;
  tail_len = len < wanted ? len : wanted;
  free(tail);
  tail = allocate(tail_len);
  memcpy(tail, all + len - tail_len, tail_len);
  free(all);
  return found;
}

void exports_steersman_policy_on_step_on_step(exports_steersman_policy_on_step_step_t *step, exports_steersman_policy_on_step_list_action_t *actions) {
  actions->len = 0;
  actions->ptr = allocate(3 * sizeof *actions->ptr);
  // Once is enough: the ban holds for the rest of the reply.
  if (banned.is_some) {
    banned.is_some = false;
    steersman_policy_types_action_t *action = &actions->ptr[actions->len++];
    action->tag = STEERSMAN_POLICY_TYPES_ACTION_BAN;
    action->val.ban.tokens.len = 1;
    action->val.ban.tokens.ptr = allocate(sizeof(uint32_t));
    action->val.ban.tokens.ptr[0] = banned.val;
    action->val.ban.steps = 0;
  }
  bool is_long = step->budget_reached || step->reasoning_tokens >= budget;
  if (step->phase == STEERSMAN_POLICY_TYPES_PHASE_REASONING && is_long) {
    steersman_policy_types_action_t *action = &actions->ptr[actions->len++];
    action->tag = STEERSMAN_POLICY_TYPES_ACTION_CLOSE_REASONING;
    guest_string_dup(&action->val.close_reasoning, "In short: ");
  }
  if (step->phase == STEERSMAN_POLICY_TYPES_PHASE_ANSWER && *phrase && says_phrase(&step->text)) {
    steersman_policy_types_action_t *action = &actions->ptr[actions->len++];
    action->tag = STEERSMAN_POLICY_TYPES_ACTION_STOP;
    char *reason = join((const char *const[]){"the answer contains `", phrase, "`", NULL});
    guest_string_dup(&action->val.stop, reason);
    free(reason);
  }
  exports_steersman_policy_on_step_step_free(step);
}

void exports_steersman_policy_on_tool_call_on_tool_call(exports_steersman_policy_on_tool_call_tool_call_view_t *call, exports_steersman_policy_on_tool_call_verdict_t *verdict) {
  verdict->tag = STEERSMAN_POLICY_TYPES_VERDICT_ACCEPT;
  for (size_t i = 0; i < call->earlier.len; i++) {
    steersman_policy_types_earlier_call_t *earlier = &call->earlier.ptr[i];
    if (earlier->answered.is_some && equal(&earlier->name, &call->name) && equal(&earlier->arguments, &call->digest)) {
      verdict->tag = STEERSMAN_POLICY_TYPES_VERDICT_REPAIR;
      guest_string_dup(&verdict->val.repair, "I have that result already: ");
      break;
    }
  }
  exports_steersman_policy_on_tool_call_tool_call_view_free(call);
}
