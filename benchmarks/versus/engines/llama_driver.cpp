// llama.cpp's library as an engine alone. Of the model given by its path, with threads, sequences,
// tokens of each and the most that are read at once: answers what comes on stdin,
//   max_tokens temperature ignore_eos num_prompts, then a line of token ids for each,
// with a line "us sequence token" for each token, and "end".

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

using Clock = std::chrono::steady_clock;

struct Told {
    long us;
    int sequence;
    llama_token token;
};

struct Ask {
    int max_tokens, ignores_eos, num_prompts;
    float temperature;
    std::vector<std::vector<llama_token>> prompts;
};

[[noreturn]] void fail(const std::string& what) {
    std::cerr << "Error: " << what << std::endl;
    std::exit(1);
}

bool read(Ask& ask) {
    std::string line;
    if (!std::getline(std::cin, line)) return false;
    std::istringstream head(line);
    head >> ask.max_tokens >> ask.temperature >> ask.ignores_eos >> ask.num_prompts;
    ask.prompts.clear();
    for (int i = 0; i < ask.num_prompts && std::getline(std::cin, line); i++) {
        std::istringstream ids(line);
        ask.prompts.emplace_back();
        for (llama_token id; ids >> id;) ask.prompts.back().push_back(id);
    }
    return true;
}

llama_sampler* sampler(float temperature, uint32_t seed) {
    llama_sampler* chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (temperature == 0) {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_temp(temperature));
        llama_sampler_chain_add(chain, llama_sampler_init_dist(seed));
    }
    return chain;
}

void add(llama_batch& batch, llama_token token, int at, int sequence, bool is_read) {
    const int i = batch.n_tokens++;
    batch.token[i] = token;
    batch.pos[i] = at;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = sequence;
    batch.logits[i] = is_read;
}

struct Engine {
    llama_context* ctx;
    const llama_vocab* vocab;
    llama_batch batch;
    int most;
    std::vector<Told> told;
    std::vector<int> read_at;  // of each sequence, where its logits are; -1: nowhere
    Clock::time_point began;

    void decode() {
        if (llama_decode(ctx, batch) != 0) fail("llama_decode did not succeed");
    }

    // Samples for whoever is read in the batch that was decoded last.
    void sample(std::vector<llama_sampler*>& chains, std::vector<llama_token>& last) {
        std::vector<int> sampled;
        for (int s = 0; s < (int)read_at.size(); s++) {
            if (read_at[s] < 0) continue;
            last[s] = llama_sampler_sample(chains[s], ctx, read_at[s]);
            sampled.push_back(s);
        }
        const long us =
            std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began).count();
        for (int s : sampled) told.push_back({us, s, last[s]});
    }

    void answer(const Ask& ask) {
        llama_memory_clear(llama_get_memory(ctx), false);
        told.clear();
        const int num = ask.num_prompts;
        std::vector<llama_sampler*> chains;
        for (int s = 0; s < num; s++) chains.push_back(sampler(ask.temperature, s));
        std::vector<llama_token> last(num);
        std::vector<int> at(num), left(num, ask.max_tokens);
        began = Clock::now();
        read_at.assign(num, -1);
        batch.n_tokens = 0;
        for (int s = 0; s < num; s++) {
            for (llama_token id : ask.prompts[s]) {
                const bool is_last = at[s] + 1 == (int)ask.prompts[s].size();
                if (is_last) read_at[s] = batch.n_tokens;
                add(batch, id, at[s]++, s, is_last);
                if (batch.n_tokens == most || (is_last && s + 1 == num)) {
                    decode();
                    sample(chains, last);
                    read_at.assign(num, -1);
                    batch.n_tokens = 0;
                }
            }
        }
        while (true) {
            batch.n_tokens = 0;
            for (int s = 0; s < num; s++) {
                read_at[s] = -1;
                if (--left[s] <= 0) continue;
                if (!ask.ignores_eos && llama_vocab_is_eog(vocab, last[s])) {
                    left[s] = 0;
                    continue;
                }
                read_at[s] = batch.n_tokens;
                add(batch, last[s], at[s]++, s, true);
            }
            if (batch.n_tokens == 0) break;
            decode();
            sample(chains, last);
        }
        for (llama_sampler* chain : chains) llama_sampler_free(chain);
    }
};

int main(int argc, char** argv) {
    if (argc != 6) fail("MODEL THREADS SEQUENCES TOKENS_EACH MAX_PAIRS_PER_PASS");
    const int threads = std::atoi(argv[2]), sequences = std::atoi(argv[3]);
    const int each = std::atoi(argv[4]), most = std::atoi(argv[5]);
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == nullptr) fail("the model cannot be loaded");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = sequences * each;
    params.n_batch = params.n_ubatch = most;
    params.n_seq_max = sequences;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.kv_unified = false;
    llama_context* ctx = llama_init_from_model(model, params);
    if (ctx == nullptr) fail("there is no context of that size");
    Engine engine{ctx, llama_model_get_vocab(model), llama_batch_init(most, 0, 1), most};
    std::cout << "ready" << std::endl;
    for (Ask ask; read(ask);) {
        engine.answer(ask);
        for (const Told& one : engine.told)
            std::printf("%ld %d %d\n", one.us, one.sequence, one.token);
        std::printf("end\n");
        std::fflush(stdout);
    }
    llama_free(ctx);
    llama_model_free(model);
}
