# A thin front of Meson and of the scripts in tools/; nothing is decided here.
BUILD ?= build

all: $(BUILD)/build.ninja
	ninja -C $(BUILD)

$(BUILD)/build.ninja:
	meson setup $(BUILD)

demo:
	sh tools/demo

check:
	sh tools/check

check-full:
	sh tools/check --full

ci:
	sh .ci/run

setup:
	sh tools/setup build model check

model:
	sh tools/get-model

bench: $(BUILD)/build.ninja
	ninja -C $(BUILD) tests/kern/checkasm
	$(BUILD)/tests/kern/checkasm --bench

clean:
	rm -rf $(BUILD) build-check-*

.PHONY: all demo check check-full ci setup model bench clean
