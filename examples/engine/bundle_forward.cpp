// Runs a forward kernel of a bundle through CUDA's driver, and compares rows with a reference on the CPU.
//   g++ -std=c++20 -O2 -I CUDA/include bundle_forward.cpp -o bundle_forward -llzma -lz -l:libcuda.so.1
//   ./bundle_forward kernels.bundle KERNEL HEADS SEQLEN HEAD_DIM CAUSAL
//
// KERNEL is the begin of a digest of `flashtune bundle list --json`, of a bf16 kernel without features and log-sum-exp.
// CAUSAL is 0 or 1. docs/bundles.md has the format. An engine should also check each SHA-256. It may launch a stage with
// `early` by programmatic stream serialization.
#include <cuda.h>
#include <lzma.h>
#include <zlib.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>
#include <string>
#include <vector>

using Int = int64_t;
using Error = std::runtime_error;
struct Json {  // An object's values are in `items`. Numbers are integers.
    std::string text;
    Int number = 0;
    std::vector<std::string> keys;
    std::vector<Json> items;
    const Json& operator()(const std::string& key) const {
        const size_t index = std::find(keys.begin(), keys.end(), key) - keys.begin();
        return index < keys.size() ? items[index] : throw Error("no field " + key);
    }
    Int operator[](size_t index) const { return items.at(index).number; }
};

Json parse(const char*& at) {
    Json value;
    auto skip = [&] { at += std::strspn(at, " ,:\n"); };
    skip();
    if (*at == '"') {
        for (++at; *at && *at != '"'; ++at) value.text += *at == '\\' ? *++at : *at;
        ++at;
    } else if (*at == '[' || *at == '{') {
        const char end = *at++ == '[' ? ']' : '}';
        for (skip(); *at && *at != end; skip()) {
            if (end == '}') value.keys.push_back(parse(at).text);
            value.items.push_back(parse(at));
        }
        ++at;
    } else {
        value.number = *at == 't' ? 1 : std::atoll(at);  // true, false, null or a number
        at += std::strcspn(at, ",:]} \n");
    }
    return value;
}

Int little(const char* at, size_t size) { Int value = 0; return std::memcpy(&value, at, size), value; }
std::string hex(const char* at, size_t size) {
    std::string text;
    for (size_t i = 0; i < 2 * size; ++i) text += "0123456789abcdef"[at[i / 2] >> (i % 2 ? 0 : 4) & 15];
    return text;
}
std::string frame(const std::string& file, Int at, Int size, Int full_size) {
    std::string content(full_size, 0);
    lzma_stream stream = LZMA_STREAM_INIT;
    if (at + size > Int(file.size()) || lzma_alone_decoder(&stream, -1)) throw Error("a frame is damaged");
    stream.next_in = (const uint8_t*)file.data() + at, stream.avail_in = size;
    stream.next_out = (uint8_t*)content.data(), stream.avail_out = full_size;
    while (stream.avail_out && lzma_code(&stream, LZMA_RUN) == LZMA_OK) {}
    lzma_end(&stream);
    return stream.avail_out ? throw Error("a frame is damaged") : content;
}

void check(CUresult status) {
    const char* text = "unknown error";
    if (status) cuGetErrorString(status, &text), throw Error(std::string("CUDA: ") + text);
}
Int floored(Int a, Int b) { return a / b - (a % b && (a < 0) != (b < 0)); }
const std::map<std::string, Int (*)(Int, Int)> binary = {
    {"add", [](Int a, Int b) { return a + b; }}, {"min", [](Int a, Int b) { return std::min(a, b); }},
    {"sub", [](Int a, Int b) { return a - b; }}, {"max", [](Int a, Int b) { return std::max(a, b); }},
    {"mul", [](Int a, Int b) { return a * b; }}, {"gcd", [](Int a, Int b) { return std::gcd(a, b); }},
    {"eq", [](Int a, Int b) { return Int(a == b); }}, {"lt", [](Int a, Int b) { return Int(a < b); }},
    {"div", floored}, {"mod", [](Int a, Int b) { return a - b * floored(a, b); }},
};

// Returns all values of a program. All tensors have the same shape and strides.
std::vector<Int> evaluate(const Json& program, const Int (&sizes)[4], const Int (&strides)[4], Int processors) {
    std::vector<Int> values;
    for (Json instruction : program.items) {
        const std::string name = instruction.items.at(0).text;
        instruction.items.resize(4);
        const Int a = instruction[1], b = instruction[2], c = instruction[3];
        if (name == "const") values.push_back(a);
        else if (name == "size") values.push_back(sizes[b]);
        else if (name == "stride") values.push_back(strides[b]);
        else if (name == "multiprocessors") values.push_back(processors);
        else if (name == "bits") values.push_back(std::bit_width(uint64_t(values.at(a))));
        else if (name == "select") values.push_back(values.at(values.at(a) ? b : c));
        else if (name == "refuse" && !values.at(a)) values.push_back(0);
        else if (binary.count(name)) values.push_back(binary.at(name)(values.at(a), values.at(b)));
        else throw Error("the kernel cannot take these tensors: " + name);
    }
    return values;
}
float number_of(uint16_t bf16) { return std::bit_cast<float>(uint32_t(bf16) << 16); }
int main(int count, char** words) try {
    if (count != 7) throw Error("arguments: FILE KERNEL HEADS SEQLEN HEAD_DIM CAUSAL");
    const Int heads = atoi(words[3]), length = atoi(words[4]), width = atoi(words[5]), causal = atoi(words[6]);
    std::ifstream stream(words[1], std::ios::binary);
    const std::string file(std::istreambuf_iterator<char>(stream), {});
    const Int packed = file.size() > 52 ? little(&file[12], 8) : 0, start = 52 + packed;
    if (file.compare(0, 12, "FTBUNDLE\1\0\0\0", 12) || start > Int(file.size())) throw Error("this is no bundle");
    std::string index(64 << 20, 0); uLongf size = index.size();
    if (uncompress((Bytef*)index.data(), &size, (Bytef*)&file[52], packed)) throw Error("the index is damaged");
    // The index has sizes of 4 bytes, a head, and rows of entries (64 bytes) and machine code (44 bytes).
    const char *at = &index[16], *row = at + little(&index[0], 4), *codes = row + 64 * little(&index[4], 4);
    const char* recipes = codes + 44 * little(&index[8], 4);
    const Json head = parse(at), &groups = head("groups");
    while (row < codes && !hex(row, 16).starts_with(words[2])) row += 64;
    if (row >= codes) throw Error("the bundle has no such kernel");
    const std::string text = frame(file, start + little(row + 16, 8), little(row + 24, 4), little(row + 28, 4));
    const Json entry = parse(at = text.c_str()), &plan = entry("plan");
    CUdevice device; CUcontext context; int processors;
    check(cuInit(0)), check(cuDeviceGet(&device, 0)), check(cuDevicePrimaryCtxRetain(&context, device));
    check(cuCtxSetCurrent(context)), check(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    const size_t numbers = heads * length * width;  // Tensors are [1, heads, length, width] and contiguous.
    std::map<std::string, std::vector<uint16_t>> values_of;
    std::map<std::string, CUdeviceptr> memory;
    uint64_t random = 1;
    for (const char* name : {"q", "k", "v", "out"}) {
        for (size_t i = 0; i < numbers; ++i) {  // From -2 to 2.
            random = random * 6364136223846793005u + 1442695040888963407u;
            values_of[name].push_back(std::bit_cast<uint32_t>(float(int32_t(random >> 32)) * 0x1p-30f) >> 16);
        }
        check(cuMemAlloc(&memory[name], 2 * numbers));
        check(cuMemcpyHtoD(memory[name], values_of[name].data(), 2 * numbers));
    }
    const Int sizes[] = {1, heads, length, width}, strides[] = {Int(numbers), length * width, width, 1};
    const std::vector<Int> values = evaluate(plan("program"), sizes, strides, processors);
    for (const Json& workspace : plan("workspaces").items) {  // float32
        size_t bytes = 4;
        for (const Json& extent : workspace("shape").items) bytes *= values.at(extent.number);
        check(cuMemAlloc(&memory[workspace("name").text], std::max<size_t>(bytes, 4)));
    }
    std::vector<CUtensorMap> maps;
    for (const Json& descriptor : plan("descriptors").items) {  // The driver takes the last dimension first.
        std::vector<cuuint64_t> extents, steps;
        std::vector<cuuint32_t> box, ones(descriptor("box").items.size(), 1);
        for (size_t i = ones.size(); i-- > 0; box.push_back(descriptor("box")[i])) {
            extents.push_back(values.at(descriptor("shape")[i]));
            steps.push_back(values.at(descriptor("strides")[i]) * descriptor("element_bytes").number);
        }
        check(cuTensorMapEncodeTiled(
            &maps.emplace_back(), CUtensorMapDataType(descriptor("element_type").number), box.size(),
            (void*)memory.at(descriptor("tensor").text), extents.data(), steps.data() + 1, box.data(), ones.data(),
            CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(descriptor("swizzle").number),
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    }
    const float scale = 1 / std::sqrt(float(width));
    for (const Json& stage : entry("stages").items) {
        const char* piece = codes;
        while (piece < recipes && hex(piece, 32) != stage("code").text) piece += 44;
        const Json& group = groups.items.at(little(piece + 32, 4));  // [offset, size, decompressed size, SHA-256]
        const std::string code = frame(file, start + group[0], group[1], group[2]).substr(little(piece + 36, 4));
        CUmodule module; CUfunction function;
        const unsigned shared = stage("shared_bytes").number;
        check(cuModuleLoadData(&module, code.data()));
        check(cuModuleGetFunction(&function, module, stage("function").text.c_str()));
        check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared));
        std::vector<Int> storage(stage("parameters").items.size());  // Of 4 or 8 bytes, little-endian.
        std::vector<void*> parameters;
        for (const Json& parameter : stage("parameters").items) {  // [type, name, value]
            Int& word = storage.at(parameters.size());
            const std::string& name = parameter.items.at(1).text;
            parameters.push_back(&word);
            if (parameter.items[0].text == "map") parameters.back() = &maps.at(parameter[2]);
            else if (name == "scale") std::memcpy(&word, &scale, 4);
            else word = name.empty() ? values.at(parameter[2]) : Int(memory.at(name));
        }
        unsigned grid[3] = {1, 1, 1}, threads = stage("threads").number;
        for (size_t i = 0; i < stage("grid").items.size(); ++i) grid[i] = values.at(stage("grid")[i]);
        check(cuLaunchKernel(function, grid[0], grid[1], grid[2], threads, 1, 1, shared, nullptr, parameters.data(), 0));
    }
    check(cuMemcpyDtoH(values_of["out"].data(), memory["out"], 2 * numbers));
    double worst = 0;
    auto element = [&](const char* name, Int row, Int i) { return number_of(values_of[name][row * width + i]); };
    for (Int row = 0; row < heads * length; row += 97) {
        const Int first = row / length * length, last = causal ? row : first + length - 1;
        std::vector<double> sums(width + 1);
        for (Int key = first; key <= last; ++key) {
            double score = 0;
            for (Int i = 0; i < width; ++i) score += element("q", row, i) * element("k", key, i);
            for (Int i = 0; i <= width; ++i) sums[i] += std::exp(score * scale) * (i < width ? element("v", key, i) : 1);
        }
        for (Int i = 0; i < width; ++i) worst = std::max(worst, std::abs(sums[i] / sums[width] - element("out", row, i)));
    }
    std::cout << entry("kernel").text << ": largest difference " << worst << "\n";
    return worst < 0.02 ? 0 : 1;
} catch (const std::exception& error) { return std::cerr << error.what() << "\n", 2; }
