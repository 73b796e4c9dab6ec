// Records the operators of a tensor function while it runs once, and replays them without Python,
// like a CUDA graph. Every replay allocates its results, so the caller owns them.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

class Tape;
thread_local Tape* recording = nullptr;
thread_local int depth = 0;  // depth of nested operator calls; only the outermost are recorded

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call);
void on_end(const at::RecordFunction& call, at::ObserverContext*);

// Operators that read values on the host or create tensors from host data. They cannot be replayed.
const std::unordered_set<std::string> kOfTheHost = {
    "aten::item",  "aten::_local_scalar_dense", "aten::is_nonzero",
    "aten::equal", "aten::lift_fresh",          "aten::empty",
    "aten::resolve_conj"};  // called by tolist, which then reads memory directly

struct Place {
  uint32_t argument, item;  // index of the item, if the argument is a list
  uint32_t value;
};

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;  // recorded arguments; those without a place are constants
  std::vector<Place> places;
  std::vector<Place> results;
  std::vector<uint32_t> last_used;  // values that no later call reads
};

class Tape : public torch::CustomClassHolder {
 public:
  // Starts to record the operators of this thread. Each replay replaces ``inputs``.
  void begin(const std::vector<Tensor>& inputs) {
    TORCH_CHECK(recording == nullptr && calls_.empty(), "a tape is recorded once, one at a time");
    for (const Tensor& input : inputs) number_of(input);
    num_inputs_ = inputs.size();
    recording = this;
    depth = 0;
    auto callback = at::RecordFunctionCallback(on_start, on_end);
    callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
    handle_ = at::addThreadLocalCallback(callback);
  }

  void end(const std::vector<Tensor>& outputs) {
    stop();
    TORCH_CHECK(wrong_.empty(), wrong_);
    for (const Tensor& output : outputs) {
      auto found = numbers_.find(output.unsafeGetTensorImpl());
      TORCH_CHECK(found != numbers_.end(), "an output must come from a recorded operator");
      outputs_.push_back(found->second);
    }
    num_values_ = numbers_.size();
    mark_last_uses();
    for (Call& call : calls_) {
      for (const Place& place : call.places) put(call.arguments[place.argument], place.item, Tensor());
      call.places.shrink_to_fit();
      call.results.shrink_to_fit();
      call.last_used.shrink_to_fit();
    }
    calls_.shrink_to_fit();
    numbers_.clear();
    kept_.clear();
    give_back();
  }

  // Stops recording, also after an exception.
  void stop() {
    if (recording != this) return;
    recording = nullptr;
    at::removeCallback(handle_);
  }

  std::vector<Tensor> play(std::vector<Tensor> inputs) {
    TORCH_CHECK(inputs.size() == num_inputs_, "recorded with other inputs");
    std::vector<IValue> values(num_values_);
    for (size_t i = 0; i < inputs.size(); i++) values[i] = std::move(inputs[i]);
    std::vector<IValue> stack;
    for (const Call& call : calls_) {
      stack = call.arguments;
      for (const Place& place : call.places)
        put(stack[place.argument], place.item, values[place.value]);
      call.op.callBoxed(&stack);
      for (const Place& place : call.results) {
        IValue& result = stack[place.argument];
        values[place.value] = result.isList() ? result.toListRef()[place.item] : result;
      }
      for (size_t value : call.last_used) values[value] = IValue();
    }
    std::vector<Tensor> outputs;
    for (size_t value : outputs_) outputs.push_back(values[value].toTensor());
    return outputs;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Call& call : calls_) names.push_back(call.op.schema().name());
    return names;
  }

  // Errors are stored and raised in ``end``, because torch drops exceptions of callbacks.
  void called(const at::RecordFunction& call) {
    auto name = call.operator_name();
    if (!name.has_value() || kOfTheHost.count(name->name))
      wrong_ = std::string(call.name()) + " cannot be recorded: its values are the host's";
    if (!wrong_.empty()) return;
    auto inputs = call.inputs();
    open_ = {c10::Dispatcher::singleton().findSchemaOrThrow(name->name.c_str(),
                                                            name->overload_name.c_str()),
             std::vector<IValue>(inputs.begin(), inputs.end())};
  }

  void returned(const at::RecordFunction& call) {
    if (!open_.has_value()) return;
    std::vector<IValue>& arguments = open_->arguments;
    for (uint32_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].isList()) arguments[i] = IValue(arguments[i].toList().copy());
      each_tensor(arguments[i], [&](const Tensor& tensor, uint32_t item) {
        auto found = numbers_.find(tensor.unsafeGetTensorImpl());
        if (found != numbers_.end()) open_->places.push_back({i, item, found->second});
      });
    }
    bool is_new = false;
    for (uint32_t i = 0; i < call.outputs().size(); i++)
      each_tensor(call.outputs()[i], [&](const Tensor& tensor, uint32_t item) {
        is_new |= numbers_.count(tensor.unsafeGetTensorImpl()) == 0;
        open_->results.push_back({i, item, number_of(tensor)});
      });
    // A call that returned its own input and changed nothing can be omitted.
    if (is_new || open_->op.schema().is_mutable()) calls_.push_back(std::move(*open_));
    open_.reset();
  }

  // Refuses operators, at any depth, whose output shape or value depends on data, such as nonzero
  // inside an index by a mask. The index operator is exempt, because it has the tag even if its
  // indices are no masks.
  void check_shape(const at::RecordFunction& call) {
    auto name = call.operator_name();
    if (!name.has_value() || name->name == "aten::index") return;
    auto op = c10::Dispatcher::singleton().findOp(*name);
    if (op.has_value() && (op->hasTag(at::Tag::dynamic_output_shape) ||
                           op->hasTag(at::Tag::data_dependent_output)))
      wrong_ = std::string(call.name()) + " cannot be recorded: its values are the host's";
  }

 private:
  // Returns freed memory to the system. Recording keeps all intermediate tensors at once, which a
  // replay does not. Without this, malloc would keep the memory, fragmented by longer-lived
  // tensors.
  static void give_back() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
  }

  // Sets an argument or an item of it.
  static void put(IValue& argument, size_t item, const IValue& value) {
    if (!argument.isList()) {
      argument = value;
      return;
    }
    // Copies the list. Otherwise the recorded one would hold this replay's tensors until the next.
    auto items = argument.toList().copy();
    items.set(item, value);
    argument = items;
  }

  template <class Function>
  static void each_tensor(const IValue& value, Function function) {
    if (value.isTensor() && value.toTensor().defined()) function(value.toTensor(), 0);
    if (!value.isList()) return;
    auto items = value.toListRef();
    for (size_t i = 0; i < items.size(); i++)
      if (items[i].isTensor()) function(items[i].toTensor(), i);
  }

  uint32_t number_of(const Tensor& tensor) {
    auto [found, is_new] = numbers_.try_emplace(tensor.unsafeGetTensorImpl(), numbers_.size());
    if (is_new) kept_.push_back(tensor);
    return found->second;
  }

  void mark_last_uses() {
    std::vector<bool> is_needed(num_values_, false);
    for (size_t value : outputs_) is_needed[value] = true;
    for (auto call = calls_.rbegin(); call != calls_.rend(); call++)
      for (const auto* places : {&call->results, &call->places})
        for (const Place& place : *places)
          if (!is_needed[place.value]) {
            is_needed[place.value] = true;
            call->last_used.push_back(place.value);
          }
  }

  std::vector<Call> calls_;
  std::optional<Call> open_;
  std::unordered_map<c10::TensorImpl*, uint32_t> numbers_;
  std::vector<Tensor> kept_;  // keeps tensors alive, so that no two values share an address
  std::vector<size_t> outputs_;
  size_t num_inputs_ = 0, num_values_ = 0;
  std::string wrong_;
  at::CallbackHandle handle_ = 0;
};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
  if (recording == nullptr) return nullptr;
  recording->check_shape(call);
  if (depth++ == 0) recording->called(call);
  return nullptr;
}

void on_end(const at::RecordFunction& call, at::ObserverContext*) {
  if (recording != nullptr && --depth == 0) recording->returned(call);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.class_<Tape>("Tape")
      .def(torch::init<>())
      .def("begin", [](const c10::intrusive_ptr<Tape>& self,
                       std::vector<Tensor> inputs) { self->begin(inputs); })
      .def("end", [](const c10::intrusive_ptr<Tape>& self,
                     std::vector<Tensor> outputs) { self->end(outputs); })
      .def("stop", &Tape::stop)
      .def("play", &Tape::play)
      .def("names", &Tape::names);
}
